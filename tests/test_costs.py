"""Counting a compiled program: FLOPs, memory traffic and collectives of programs small enough to count by hand."""

import dataclasses
import re
import textwrap

import pytest

from refusion_jax.distributed.chips import Calibration, find_chip, peak_flops
from refusion_jax.planning import costs
from refusion_jax.planning.costs import GATHER_BY_SUM, Collective, Costs, Operation, count, first_group, keys_seen
from refusion_jax.planning.estimate import estimate
from refusion_jax.planning.hlo import Instruction, parse

LOOP = """
HloModule loop

%body (state: (s32[], f32[4,8], f32[8,8])) -> (s32[], f32[4,8], f32[8,8]) {
  %state = (s32[], f32[4,8]{1,0}, f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %x = f32[4,8]{1,0} get-tuple-element(%state), index=1
  %w = f32[8,8]{1,0} get-tuple-element(%state), index=2
  %y = f32[4,8]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %out = (s32[], f32[4,8]{1,0}, f32[8,8]{1,0}) tuple(%next, %y, %w)
}

%condition (state.1: (s32[], f32[4,8], f32[8,8])) -> pred[] {
  %state.1 = (s32[], f32[4,8]{1,0}, f32[8,8]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %limit = s32[] constant(13)
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main (x.1: f32[4,8], w.1: f32[8,8]) -> (s32[], f32[4,8], f32[8,8]) {
  %three = s32[] constant(3)
  %x.1 = f32[4,8]{1,0} parameter(0)
  %w.1 = f32[8,8]{1,0} parameter(1)
  %begin = (s32[], f32[4,8]{1,0}, f32[8,8]{1,0}) tuple(%three, %x.1, %w.1)
  ROOT %loop = (s32[], f32[4,8]{1,0}, f32[8,8]{1,0}) while(%begin), condition=%condition, body=%body
}
"""


def test_a_loop_counts_as_often_as_it_runs_and_once_where_the_data_decides():
    costs = count(parse(LOOP), chips_per_slice=1)  # i = 3, 5, 7, 9, 11
    assert costs.flops == 5 * 2 * 4 * 8 * 8
    assert costs.bytes == 5 * (4 * (4 * 8 + 8 * 8 + 4 * 8) + 3 * 4)  # the product, and the counter's addition
    open_ended = LOOP.replace("compare(%i.1, %limit), direction=LT", "compare(%i.1, %limit), direction=NE")
    assert count(parse(open_ended), chips_per_slice=1).flops == 2 * 4 * 8 * 8


def test_a_conditional_counts_the_dearest_branch_or_the_cheapest_if_its_scope_is_unused():
    text = """
%none (x: f32[4,8]) -> f32[4,8] {
  ROOT %x = f32[4,8]{1,0} parameter(0)
}

%some (y: f32[4,8]) -> f32[4,8] {
  %y = f32[4,8]{1,0} parameter(0)
  ROOT %more = f32[4,8]{1,0} add(%y, %y)
}

ENTRY %main (is_some: pred[], z: f32[4,8]) -> f32[4,8] {
  %is_some = pred[] parameter(0)
  %z = f32[4,8]{1,0} parameter(1)
  ROOT %c = f32[4,8]{1,0} conditional(%is_some, %z, %z), true_computation=%some, false_computation=%none, metadata={op_name="f/seldom/cond"}
}
"""  # noqa: E501  as it is printed
    assert [count(parse(text), 1, unused).bytes for unused in ("", "seldom", "often")] == [3 * 128, 0, 3 * 128]


@pytest.mark.parametrize(("result", "moved"), [("{1,0}", 2 * 64), ("{1,0:S(1)}", 64)])
def test_a_slice_is_written_to_memory_unless_it_stays_on_the_chip(result, moved):
    text = f"""
ENTRY %main (x: f32[4,8]) -> f32[2,8] {{
  %x = f32[4,8]{{1,0}} parameter(0)
  ROOT %s = f32[2,8]{result} slice(%x), slice={{[0:2], [0:8]}}
}}
"""
    assert count(parse(text), 1).bytes == moved


def test_an_instruction_has_the_fields_that_its_docstring_names():
    drawn = re.findall(r"^ +((?:ROOT )?%.+)$", Instruction.__doc__, re.MULTILINE)
    text = "\n  ".join(["ENTRY %main () -> f32[4,8] {", *drawn]) + "\n}\n"
    x, w, y = parse(text).computations["main"].instructions.values()
    assert (y.name, y.type, y.opcode, y.operands) == ("y", "f32[4,8]{1,0}", "dot", (x, w))
    assert (y.literal, y.attributes, y.is_root) == ("", drawn[-1].partition(")")[2], True)
    assert (x.literal, w.literal) == ("0", "1")


def test_elements_of_tuples_are_found_where_they_are_used():
    """Since jax 0.12 the operand %tuple#1 stands for an instruction of its own."""
    written_out = re.compile(r"\n  %(\S+) = \S+ get-tuple-element\(%(\S+)\), index=(\d)")
    short = LOOP
    for name, of, index in written_out.findall(LOOP):
        short = (
            written_out.sub("", short, 1)
            .replace(f"%{name},", f"%{of}#{index},")
            .replace(f"%{name})", f"%{of}#{index})")
        )
    assert "get-tuple-element" not in short
    assert count(parse(short), chips_per_slice=1) == count(parse(LOOP), chips_per_slice=1)
    nested = """
ENTRY %main (x: ((f32[8], f32[4,8]), f32[16])) -> f32[4] {
  %x = ((f32[8]{0}, /*index=1*/f32[4,8]{1,0:T(8,128)}), f32[16]{0}) parameter(0)
  ROOT %y = f32[4]{0} dot(%x#0#1, %x#0#0), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    assert count(parse(nested), chips_per_slice=1).bytes == 4 * (4 * 8 + 8 + 4)


def collective(line: str, chips_per_slice: int = 8) -> Collective:
    """What is counted of one collective of a float32 array of 16 elements."""
    text = f"ENTRY %main (x: f32[16]) -> f32[] {{\n  %x = f32[16]{{0}} parameter(0)\n  ROOT {line}\n}}\n"
    (found,) = count(parse(text), chips_per_slice).collectives
    return found


@pytest.mark.parametrize(
    ("line", "received"),
    [
        ("%c = f32[64]{0} all-gather(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}", 3 * 64),
        ("%c = f32[128]{0} all-gather(%x), replica_groups=[1,8]<=[8], dimensions={0}", 7 * 64),
        ("%c = f32[16]{0} all-reduce(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add", 2 * 64 * 3 / 4),
        ("%c = f32[4]{0} reduce-scatter(%x), replica_groups=[2,4]<=[8], dimensions={0}", 64 * 3 / 4),
        ("%c = f32[16]{0} all-to-all(%x), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", 64 / 2),
        ("%c = f32[16]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}", 64),
        ("%c = f32[16]{0} all-reduce(%x), replica_groups={{0},{1}}, to_apply=%add", 0),
    ],
)
def test_a_collective_counts_what_a_chip_receives_in_a_ring(line, received):
    assert collective(line).bytes == received


@pytest.mark.parametrize(
    ("groups", "over"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", "ici"),
        ("{{0,4},{1,5},{2,6},{3,7}}", "dcn"),
        ("[2,4]<=[8]", "ici"),
        ("[4,2]<=[2,4]T(1,0)", "dcn"),
        ("[1,8]<=[8]", "dcn"),
    ],
)
def test_what_leaves_a_slice_of_four_chips_goes_over_the_data_centre_network(groups, over):
    line = f"%c = f32[16]{{0}} all-reduce(%x), replica_groups={groups}, to_apply=%add"
    assert collective(line, chips_per_slice=4).over == over
    assert collective(line, chips_per_slice=8).over == "ici"


def test_only_an_asynchronous_collective_overlaps_with_arithmetic():
    line = "%c = f32[16]{0} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add"
    assert not collective(line).overlapped
    assert collective(line.replace("all-reduce(", "all-reduce-start(")).overlapped


@pytest.mark.parametrize("taken_from", ["table", "turned", "turned_here"])
def test_a_fusion_reads_only_the_slices_it_takes_and_writes_in_place(taken_from):
    """Also from a table in another layout, which TPU7x's compiler makes inside of the fusion."""
    example = textwrap.dedent(costs.__doc__[costs.__doc__.index("    %fused") :])
    turn = """
%turn (own: f32[100,8]) -> f32[100,8] {
  %own = f32[100,8]{1,0} parameter(0)
  ROOT %copied = f32[100,8]{0,1} copy(%own)
}

"""
    turned = "  %turned = f32[100,8]{0,1} fusion(%table), kind=kLoop, calls=%turn\n"
    turned += "  %turned_here = f32[100,8]{0,1} copy(%table)\n"
    text = turn + example.replace("(%table,", f"(%{taken_from},").replace("  %old", f"{turned}  %old")
    moved = re.search(r"moves ([\d +]+) bytes", costs.__doc__)[1]
    assert count(parse(text), chips_per_slice=1).bytes == sum(map(int, moved.split(" + ")))


def test_groups_of_chips_are_read_as_the_docstring_says():
    drawn = re.findall(r"^ +(\w+=\S+(?: \{.*?\})?)  +(\d+) (\d+)", first_group.__doc__, re.MULTILINE)
    assert len(drawn) == 5
    for attribute, *chips in drawn:
        assert first_group(f", channel_id=1, {attribute}, use_global_device_ids=true") == [*map(int, chips)]


def test_a_step_takes_its_operations_and_the_collectives_that_nothing_hides():
    chip = find_chip("v5p:2x2x1")
    flops, size = chip.peak_flops, chip.hbm_bandwidth  # of one second each
    waits = Collective("all-reduce", "ici", 1, False, chip.ici_bandwidth * 0.5)
    hidden = Collective("all-gather", "ici", 1, True, chip.ici_bandwidth * 2)
    operations = (Operation(2, flops, 0.1 * size), Operation(1, flops, 3 * size))
    costs = Costs(operations, (waits, hidden))
    times = estimate(costs, chip)
    assert times.compute == pytest.approx(3)
    assert times.hbm == pytest.approx(2 * 0.1 + 3)
    assert times.operations == pytest.approx(2 + 3)
    assert times.waiting == pytest.approx(0.5)
    assert times.roofline == pytest.approx(5.5)
    flooded = dataclasses.replace(costs, collectives=(waits, dataclasses.replace(hidden, bytes=hidden.bytes * 5)))
    assert estimate(flooded, chip).roofline == pytest.approx(10.5)  # too much to hide


def test_a_calibrated_step_is_a_multiple_of_what_is_expected_and_lies_in_its_range():
    chip = dataclasses.replace(find_chip("v5p:2x2x1"), calibration=Calibration(factor=1.2, spread=0.1, runs=3))
    overlapped = Collective("all-gather", "ici", 1, True, chip.ici_bandwidth)
    costs = Costs(operations=(Operation(4, chip.peak_flops, 0),), collectives=(overlapped,))
    times = estimate(costs, chip)
    assert times.roofline == pytest.approx(4)
    assert 4 < times.expected < 5  # a part of what runs during arithmetic shows, unless it is fused with it
    fused = dataclasses.replace(costs, collectives=(dataclasses.replace(overlapped, fused=True),))
    assert estimate(fused, chip).expected == pytest.approx(4)
    assert times.step == pytest.approx(1.2 * times.expected)
    assert (times.fastest, times.slowest) == pytest.approx((times.step / 1.1, times.step * 1.1))
    lucky = dataclasses.replace(chip, calibration=Calibration(factor=1.01, spread=0.2, runs=3))
    assert estimate(costs, lucky).fastest == 4


def test_what_is_narrower_than_the_matrix_unit_reaches_a_part_of_the_peak():
    for topology, share in (("v5p:2x2x1", 1), ("v6e:2x2", 0.5)):
        chip = find_chip(topology)
        costs = Costs(operations=(Operation(1, chip.peak_flops, 0, width=128),))
        assert estimate(costs, chip).operations == pytest.approx(1 / share)


@pytest.mark.parametrize(
    ("dtype", "topology", "share"),
    [("s8", "v5e:2x2", 0.5), ("s8", "v4:2x2x1", 1), ("f8e4m3fn", "tpu7x:2x2x1", 0.5), ("f8e4m3fn", "v5e:2x2", 1)],
)
def test_products_of_a_byte_take_half_of_the_time_where_it_is_documented(dtype, topology, share):
    dot = """
ENTRY %main (a: NARROW[64,64], b: DTYPE[64,64]) -> f32[64,64] {
  %a = NARROW[64,64]{1,0} parameter(0)
  %b = DTYPE[64,64]{1,0} parameter(1)
  ROOT %dot = f32[64,64]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
""".replace("NARROW", dtype)
    narrow, wide = (
        estimate(count(parse(dot.replace("DTYPE", other)), chips_per_slice=1), find_chip(topology)).compute
        for other in (dtype, "bf16")
    )
    assert narrow == pytest.approx(share * wide)


@pytest.mark.parametrize(
    ("length", "queries", "keys", "seen"),
    [(4, 1, 1, 2.5), (4, 4, 4, 4), (4, 2, 2, 3), (4, 2, 4, 4), (4, 4, 2, 4), (8, 2, 4, 6)],
)
def test_a_causal_kernel_works_on_whole_tiles(length, queries, keys, seen):
    assert keys_seen(length, queries, keys) == seen


def kernel(name: str, tiles: str, scope: str = "attention") -> Costs:
    """Costs of an attention kernel over two heads of 8 tokens of width 4."""
    text = f"""
ENTRY %main (q: bf16[2,8,4], k: bf16[2,8,4], v: bf16[2,8,4]) -> bf16[2,8,4] {{
  %q = bf16[2,8,4]{{2,1,0}} parameter(0)
  %k = bf16[2,8,4]{{2,1,0}} parameter(1)
  %v = bf16[2,8,4]{{2,1,0}} parameter(2)
  ROOT %{name}.1 = bf16[2,8,4]{{2,1,0}} custom-call(%q, %k, %v), custom_call_target="tpu_custom_call", frontend_attributes={{kernel_metadata={{
"xprof_metadata":"{{{tiles}}}"
}}}}, metadata={{op_name="jit(step)/{scope}/pallas_call"}}, backend_config={{"custom_call_config":{{}}}}
}}
"""  # noqa: E501
    return count(parse(text), chips_per_slice=1)


def test_an_attention_kernel_counts_the_tiles_that_it_names():
    tiles = r"\"block_q\": 4, \"block_kv\": 4, \"block_q_dkv\": 2, \"block_kv_dkv\": 2, "
    product = 2 * 2 * 8 * 4  # of every query with one key
    fwd, bwd = kernel("splash_mha_fwd", tiles), kernel("splash_mha_dkv", tiles + r"\"use_fused_bwd_kernel\": false")
    assert fwd.flops == 2 * product * 6
    assert fwd.operations[0].width == 4
    assert bwd.flops == 4 * product * 5
    assert kernel("splash_mha_dkv", tiles + r"\"use_fused_bwd_kernel\": true").flops == 5 * product * 5
    assert kernel("splash_mha_fwd", tiles, scope="rows_2_tiles_1").flops == 2 * product * 4  # two rows of four tokens
    assert kernel("splash_mha_fwd", tiles, scope="rows_1_tiles_4").flops == 2 * product * 8  # who sees everything


def test_a_collective_on_the_sparse_cores_is_counted_where_it_is_described():
    text = """
%described (x.1: f32[16]) -> f32[64] {
  %x.1 = f32[16]{0} parameter(0)
  ROOT %g = f32[64]{0} all-gather(%x.1), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
}

%started (x.2: f32[16]) -> f32[64] {
  %x.2 = f32[16]{0} parameter(0)
  ROOT %c = f32[64]{0} custom-call(%x.2), custom_call_target="any", called_computations={%described}
}

ENTRY %main (x: f32[16]) -> f32[64] {
  %x = f32[16]{0} parameter(0)
  %start = ((f32[16]{0}), f32[64]{0}) async-start(%x), async_execution_thread="sparsecore", calls=%started
  ROOT %done = f32[64]{0} async-done(%start)
}
"""
    (found,) = count(parse(text), chips_per_slice=8).collectives
    assert found == Collective("all-gather", "ici", 1, True, 3 * 64)


def test_an_all_reduce_of_parts_among_zeros_is_called_a_gather():
    text = """
ENTRY %main (x: f32[4], at: s32[]) -> f32[16] {
  %x = f32[4]{0} parameter(0)
  %at = s32[] parameter(1)
  %zero = f32[] constant(0)
  %zeros = f32[16]{0} broadcast(%zero), dimensions={}
  %part = f32[16]{0} dynamic-update-slice(%zeros, %x, %at)
  ROOT %sum = f32[16]{0} all-reduce(%part), replica_groups={{0,1,2,3}}, to_apply=%add
}
"""
    (found,) = count(parse(text), chips_per_slice=4).collectives
    assert found == Collective(GATHER_BY_SUM, "ici", 1, False, 2 * 64 * 3 / 4)
    plain = text.replace("all-reduce(%part)", "all-reduce(%zeros)")
    assert count(parse(plain), chips_per_slice=4).collectives[0].kind == "all-reduce"


def test_the_longest_matching_device_kind_gives_the_peak():
    assert peak_flops("TPU v5 lite") == 197e12
    assert peak_flops("TPU v5") == 459e12
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("cpu") is None
