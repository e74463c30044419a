"""What a window costs each stage: bytes by hand, measured rates, what the last stage has beside its layers."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from strata.config import Settings
from strata.engine import mtp_file, stage_cost
from strata.engine.families import read_config
from strata.engine.placement import split_over_threads
from strata.engine.split import balance
from strata.engine.stage_cost import Costs, costs, device_seconds, float_seconds, packed_is_faster
from strata.weights.gguf import GGUFFile
from strata.weights.layouts import LAYOUTS, padded
from tests.engine.running import DATA, TINY

GLM = DATA / "tiny" / "glm4moe-iq3s.gguf"


def of(path: Path, settings: Settings, threads: int = 1) -> tuple[Costs, dict[str, tuple[int, ...]]]:
    with GGUFFile.open(path) as file:
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        return costs(settings, file, config := read_config(file), float_seconds(config, threads)), shapes


def test_layers_cost_their_bytes_and_the_last_stage_the_output_matrix() -> None:
    found, shapes = of(TINY, Settings())
    for layer, cost in enumerate(found.layers):
        assert cost == sum(4 * prod(shape) for name, shape in shapes.items() if name.startswith(f"blk.{layer}."))
    assert found.last == 4 * prod(shapes["output.weight"])
    assert of(TINY, Settings(), threads=2)[0] == Costs(tuple(cost / 2 for cost in found.layers), found.last / 2)


def test_a_drafter_is_counted_on_the_last_stage_once_for_each_draft() -> None:
    """Its block, of experts those that a row goes to, and the output matrix; nothing while drafts are off."""
    plain, shapes = of(GLM, Settings(spec=1))
    with GGUFFile.open(GLM) as file:
        config = read_config(file)
    assert config.experts is not None and len(config.mtp_blocks) == 1 and len(plain.layers) == config.num_layers
    part = config.experts.used / config.experts.count
    own = {name: shape for name, shape in shapes.items() if name.startswith(f"blk.{config.mtp_blocks[0]}.")}
    ends = [own.pop(f"blk.{config.mtp_blocks[0]}.nextn.{name}.weight") for name in ("embed_tokens", "shared_head_head")]
    assert ends == [shapes["output.weight"]] * 2, "as large as the trunk's: one is looked up, the other takes the place of the trunk's"
    block = sum(4 * prod(shape) * (part if len(shape) == 3 else 1) for shape in own.values())
    for spec in (2, 4):
        drafting, _ = of(GLM, Settings(spec=spec))
        assert drafting.layers == plain.layers
        assert drafting.last - plain.last == pytest.approx((spec - 1) * (block + plain.last))


def test_a_short_list_of_tokens_makes_drafts_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, whole = of(GLM, Settings(spec=1))[0], of(GLM, Settings(spec=2))[0]
    monkeypatch.setattr(mtp_file, "draft_vocabulary", lambda file, config, most: range(config.vocab_size // 4))
    short = of(GLM, Settings(spec=2))[0]
    assert whole.last - short.last == pytest.approx(0.75 * plain.last)


def test_drafts_move_the_cut_towards_the_front() -> None:
    with GGUFFile.open(GLM) as file:
        config = read_config(file)
        cuts = [split_over_threads(Settings(spec=spec), file, config, [1, 1])[1].start for spec in (1, 4)]
        assert cuts[1] >= cuts[0] and split_over_threads(Settings(spec=4), file, config, [2]) == [range(config.num_layers)]
    light, heavy = (balance([Costs((1.0,) * 24, last)] * 2) for last in (2.0, 2.0 + 3 * (1.0 + 2.0)))
    assert light == [range(0, 13), range(13, 24)] and heavy == [range(0, 18), range(18, 24)]


def test_a_device_reads_a_tensor_in_the_quickest_layout_that_holds_it() -> None:
    with GGUFFile.open(TINY) as file:
        config, tensors = read_config(file), dict(file.tensors.items())
    iq3, = (tensor for name, tensor in tensors.items() if name == "blk.0.ffn_up.weight")
    assert iq3.type.name == "IQ3_S"
    packed, nibbles = (LAYOUTS[name].bytes(iq3.shape[0], padded(iq3.shape[1])) for name in ("packed3", "odd4"))
    rates = {name: 1e9 for name in LAYOUTS}
    assert device_seconds(config, rates)(iq3) == packed / 1e9 and device_seconds(config, None)(iq3) == packed
    assert device_seconds(config, rates | {"packed3": 5e8})(iq3) == nibbles / 1e9
    assert device_seconds(config, rates)(tensors["output_norm.weight"]) == 0


def test_packed_weights_are_taken_where_they_were_measured_to_be_quicker() -> None:
    """3.44 bits against 4.31: packed may be read at 0.8 of the rate and take as long."""
    assert not packed_is_faster(None) and not packed_is_faster({"flat8": 1.0})
    assert packed_is_faster({"packed3": 0.81, "odd4": 1.0}) and not packed_is_faster({"packed3": 0.79, "odd4": 1.0})


def test_rates_of_unlike_devices_move_the_cut() -> None:
    with GGUFFile.open(TINY) as file:
        config = read_config(file)
        slow, fast = ({name: rate for name in LAYOUTS} for rate in (1e9, 4e9))
        stages = [costs(Settings(), file, config, device_seconds(config, rates)) for rates in (slow, fast)]
    cut = balance(stages)
    assert cut is not None and len(cut[0]) < len(cut[1])
    assert stage_cost.share_read(file.tensors["output.weight"], config) == 1.0
