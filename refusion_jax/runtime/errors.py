"""The one exception that means: the user's input is at fault, and here is what would be right."""


class UserError(ValueError):
    """Bad input. The message is one line that names the flag, file or line at fault; commands exit with code 2."""
