"""Reads the texts of web archives: WET files, and the pages of WARC files."""

from collections.abc import Iterator

from etils import epath

from refusion_jax.cli.errors import needs
from refusion_jax.data.examples import Bad, Example, Fields, decode, to_examples

_LONGEST = 1 << 24  # bytes of a record


def read_archive(path: str, fields: Fields) -> Iterator[Example | Bad]:
    """Texts of WET records, and of the main part of WARC's HTML pages; OSError if the file is damaged."""
    with needs("archives"):
        from fastwarc.warc import ArchiveIterator, WarcRecordType
        from resiliparse.extract.html2text import extract_plain_text
        from resiliparse.parse.encoding import bytes_to_str, detect_encoding
    with epath.Path(path).open("rb") as file:
        for record in ArchiveIterator(file):
            where = f"{path}: record at byte {record.stream_pos}"
            is_text = record.record_type == WarcRecordType.conversion
            is_page = record.record_type == WarcRecordType.response and "html" in (record.http_content_type or "")
            raw = record.reader.read(_LONGEST + 1) if is_text or is_page else b""
            if record.record_type == WarcRecordType.unknown:  # such as records with wrong line endings
                yield Bad(where, "a record of no WARC-Type that is known", "unreadable file")
            elif len(raw) > _LONGEST:
                yield Bad(where, f"a record of more than {_LONGEST >> 20} MiB", "too long a record")
            elif (is_text or is_page) and len(raw) < record.content_length:
                yield Bad(where, "the file ends in this record", "unreadable file")
            elif is_text or is_page:
                page = bytes_to_str(raw, record.http_charset or detect_encoding(raw)) if is_page else ""
                text = extract_plain_text(page, main_content=True) if is_page else decode(raw, where)
                item = {"text": text, "url": record.headers.get("WARC-Target-URI")}
                yield from [text] if isinstance(text, Bad) else to_examples(item, where, fields)
