"""Options of exports."""

import pytest

from headrace.convert.export import check_export
from headrace.errors import InvalidArgument


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (
            "folder",
            dict(dtype="q4_1"),
            "dtype: found q4_1, expected one of float32, bfloat16, float16, q8_0, q4",
        ),
        ("folder", dict(dtype="q8_0"), "dtype: found q8_0, which only .gguf files have"),
        ("model.gguf", dict(packed=True), "packed: expected a folder as target"),
        ("model.gguf", dict(adapter=True), "adapter: expected a folder as target"),
        ("folder", dict(adapter=True, packed=True), "adapter: "),
        ("folder", dict(adapter=True, dtype="bfloat16"), "adapter: .* the weights in float32"),
    ],
)
def test_options_that_do_not_go_together_are_refused(target: str, options: dict, message: str):
    with pytest.raises(InvalidArgument, match=message) as error:
        check_export(target, **(dict(dtype="float32", packed=False, adapter=False) | options))
    assert error.value.as_option == f"--{error.value}"


@pytest.mark.parametrize("options", [dict(), dict(packed=True), dict(adapter=True), dict(dtype="float16")])
def test_options_for_a_folder(options: dict):
    check_export("folder", **(dict(dtype="float32", packed=False, adapter=False) | options))
