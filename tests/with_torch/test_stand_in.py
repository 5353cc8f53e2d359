"""Nothing that a constructor asks for on a device by its name is looked for on that device."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from vllm_compat.commands.preflight import stand_in  # noqa: E402


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "cpu", None])
def test_a_named_device_is_meta_where_it_is_not_there(device: str | None) -> None:
    with torch.device("meta"), stand_in._nothing_on_a_device():
        made = torch.zeros(2, device=device)
        assert made.device.type == (device if device == "cpu" else "meta")
        assert made.to(torch.device("cuda")).device.type == "meta"
        assert made.cuda().device.type == "meta"
        assert torch.arange(3, device=torch.device("cuda", 0)).device.type == "meta"


def test_an_error_tells_the_module_that_raised_it_first() -> None:
    def fail() -> None:
        try:
            torch.zeros(2).view(3)
        except RuntimeError as error:
            raise ValueError("again") from error

    with pytest.raises(ValueError, match="again") as caught:
        fail()
    assert stand_in._raised_in(caught.value) == __name__  # torch raises it in C
