"""The data that a program sends between slices, read from XLA's text."""

import pytest

from jzero.planning.crossing import Collective, bytes_in, crossing, groups_of


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("[4,2]<=[8]", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("[4,2]<=[4,2]T(1,0)", [[0, 2], [4, 6], [1, 3], [5, 7]]),
        ("[4,2]<=[2,2,2]T(0,2,1)", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (
            "mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'a'}",
            [[0, 2], [1, 3], [4, 6], [5, 7]],
        ),
    ],
)
def test_groups_in_each_notation(groups: str, expected: list[list[int]]) -> None:
    assert (
        groups_of(f"%x = f32[8] all-reduce(%y), replica_groups={groups}, to_apply=%z") == expected
    )


def test_bytes_of_a_tuple() -> None:
    assert bytes_in("(f32[2,3]{1,0}, bf16[5], f32[], s8[7]{0})") == 24 + 10 + 4 + 7


def test_only_collectives_of_several_slices_count() -> None:
    program = """
  %a = f32[2,3]{1,0} all-reduce(%b), replica_groups=[4,2]<=[8], to_apply=%add
  %c = bf16[8] all-gather-start(%d), replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}
  %e = f32[5] collective-permute(%f), source_target_pairs={{3,4}}, metadata={op_name="a/while/b"}
  %g = f32[5] add(%h, %i)
"""
    assert crossing(program, devices_per_slice=4) == [
        Collective("all-gather", 16, is_repeated=False),
        Collective("collective-permute", 20, is_repeated=True),
    ]


def test_transfers_through_the_hosts_of_tpus_count() -> None:
    megascale = "is_host_transfer=true, frontend_attributes={_xla_megascale_transfer_type="
    program = f"""
%body (x: f32[8]) -> f32[8] {{
  %s = (s32[1,176]{{1,0:T(1,128)}}, u32[], token[]) send(%x, %t), {megascale}"ONE_TO_ONE"}}
}}

ENTRY %main (x: f32[8]) -> f32[8] {{
  %r = f32[8] all-reduce(%x), replica_groups={{{{0,1,2,3,4,5,6,7}}}}, to_apply=%add
  %u = (f32[36,8,128]{{2,1,0:T(8,128)}}, u32[], token[]) send(%x, %t), {megascale}"ALL_REDUCE"}}
}}
"""
    assert crossing(program, devices_per_slice=8) == [
        Collective("one-to-one", 4 * 176, is_repeated=True),
        Collective("all-reduce", 4 * 36 * 8 * 128, is_repeated=False),
    ]
