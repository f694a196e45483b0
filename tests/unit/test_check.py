"""Every impossible configuration is refused with the keys that disagree; possible ones pass."""

import pytest

from experiments import check
from tests.conftest import compose


def refusal(*overrides):
    config = check.load(compose("task=spell_backward", *overrides))
    with pytest.raises(check.ConfigError) as caught:
        check.check(config, check.build_strategies(config)[0])
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["steps=0"], "`steps` must be at least 1, not 0"),
        (["seed=-1"], "`seed` must not be negative"),
        (["algorithm.group_size=7"], "`algorithm.group_size` 7 does not divide `algorithm.batch_size`"),
        (["algorithm.batch_size=0"], "`algorithm.batch_size` must be at least 1"),
        (["algorithm.mini_batches=5"], "does not divide the"),
        (["algorithm.clip_low=1.5"], "`algorithm.clip_low` must lie between 0 and 1"),
        (["algorithm.dual_clip=0.5"], "`algorithm.dual_clip` must be above 1"),
        (["algorithm.kl_estimator=k9"], "`algorithm.kl_estimator` must be k1, k2 or k3, not k9"),
        (["strategy=exact", "algorithm.ratio_level=sequence"], "needs the whole response in one forward, but Exact"),
        (["strategy=exact", "schedule.pause_mode=retract"], "overwrites the rows of earlier tokens, which Exact needs"),
        (["schedule.sync_interval=0"], "`schedule.sync_interval` must be at least 1 update, not 0"),
        (["schedule.staleness_threshold=-0.5"], "`schedule.staleness_threshold` must not be negative"),
        (["schedule.cost.decode_step_s=0"], "`schedule.cost.decode_step_s` must be positive on the virtual clock"),
        (["schedule.cost.sync_s=0"], "`schedule.cost.sync_s` must be positive on the virtual clock"),
        (["schedule.staleness_threshold=nan"], "`schedule.staleness_threshold` must be finite, not nan"),
        (["trainer.learning_rate=inf"], "`trainer.learning_rate` must be finite"),
        (["algorithm.group_size=1"], "`algorithm.group_size` must be at least 2"),
        (["model.num_experts_per_tok=1"], "`model.num_experts_per_tok` must be at least 2"),
        (["trainer.adam_beta1=1.5"], "`trainer.adam_beta1` must lie in [0, 1)"),
        (["engine.name=vllm", "schedule=wall"], "`engine` must be embedded or sglang, not vllm"),
        (["trainer.name=fsdp"], "`trainer` must be megatron, not fsdp"),
        (["resume=nowhere"], "`resume`: there is no checkpoint in nowhere"),
        (["model.checkpoint=nowhere"], "`model.checkpoint` must be a Hugging Face folder"),
        (["shadow.strategies=[exact]"], "exact is the reference"),
        (["shadow.strategies=[replace,mine]"], "no conf/strategy/mine.yaml; there are exact, gated,"),
        (["shadow.strategies=replace"], "must be a list of names and"),
        (["shadow.strategies=[replace,replace]"], "replace is named twice"),
        (["model.num_experts_per_tok=17"], "`model.num_experts_per_tok` 17 is above `model.num_experts` 16"),
        (["model.num_key_value_heads=3"], "does not divide `model.num_attention_heads`"),
        (["model.head_dim=31"], "`model.head_dim` must be even"),
        (["model.num_hidden_layers=0"], "`model.num_hidden_layers` must be positive"),
        (["sampling.max_response_tokens=256"], "leaves no room for a prompt"),
        (["sampling.temperature=0"], "`sampling.temperature` must be positive"),
        (["sampling.top_p=1.5"], "`sampling.top_p` must lie in (0, 1]"),
        (["engine=sglang", "schedule=virtual"], "`engine=sglang` needs `schedule=wall`"),
        (["engine=sglang", "engine.url=localhost:1"], "`engine.url` must be http(s)://HOST:PORT, not localhost:1"),
        (["engine=sglang", "engine.url=http://"], "`engine.url` must be http(s)://HOST:PORT"),
        (["engine=sglang", "engine.url=http://a:99999"], "`engine.url` must be http(s)://HOST:PORT"),
        (["engine=sglang", "engine.url=http://a:b"], "`engine.url` must be http(s)://HOST:PORT"),
        (["engine=sglang", "engine.url='http://[::1'"], "`engine.url` must be http(s)://HOST:PORT"),
        (["engine=sglang", "engine.server.publish_dir=no/such"], "must be a folder that the run can write to"),
        (
            ["engine=sglang", "engine.server.extra_args=['--port=7','--tp-size','2']"],
            "`engine.server.extra_args` must not hold --port=7: the run sets",
        ),
        (["engine=sglang", "engine.server.extra_args=[--dty,half]"], "must not hold --dty"),
        (["engine=sglang", "engine.server=null"], "`engine.server` must not be null with engine=sglang"),
        (["engine=sglang", "schedule.pause_mode=in_place"], "needs `engine.server.prefix_cache=false`"),
        (["engine=sglang", "engine.server.port=70000"], "`engine.server.port` must lie in 0..65535"),
        (["engine=sglang", "engine.server.request_timeout_s=0"], "`engine.server.request_timeout_s` must be positive"),
        (
            ["engine=sglang", "engine.url=http://a:1", "engine.server.transport=disk"],
            "`engine.server.transport=disk` needs `engine.server.publish_dir`: the server at http://a:1 does not see",
        ),
        (
            ["engine=sglang", "engine.server.transport=nccl", "trainer.device=cpu"],
            "`engine.server.transport=nccl` needs trainer and server on CUDA, not `trainer.device=cpu`",
        ),
        (
            ["engine=sglang", "engine.server.transport=nccl", "engine.server.device=cpu"],
            "on CUDA, not `engine.server.device=cpu`",
        ),
        (["engine.url=http://a:1"], "`engine.url` needs engine=sglang, not embedded"),
        (["engine.max_running=0"], "`engine.max_running` must be at least 1"),
        (["trainer.device=tpu"], "`trainer.device` must be auto, cpu or cuda, not tpu"),
        (["trainer.max_grad_norm=0"], "`trainer.max_grad_norm` must be positive"),
        (["task.datasets=[]"], "`task.datasets` is empty"),
        (["task.warm_start.steps=-1"], "`task.warm_start.steps` must not be negative"),
        (["shadow.every=-1"], "`shadow.every` must not be negative"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_impossible_configurations_are_refused(overrides, message):
    assert message in refusal(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["strategy=replace", "algorithm.ratio_level=sequence"],
        ["strategy=slice_concat", "schedule.pause_mode=retract"],
        ["strategy=exact", "schedule.pause_mode=in_place"],
        ["strategy=exact", "schedule.pause_mode=retract", "engine.resume_rows=pinned"],
        ["schedule=wall"],
        ["algorithm.old_log_prob=decoupled"],
    ],
    ids=lambda value: " ".join(value) or "default",
)
def test_possible_configurations_pass(overrides):
    config = check.load(compose("task=spell_backward", *overrides))
    check.check(config, check.build_strategies(config)[0])


def test_shadow_strategies_are_built_and_checked_too():
    assert "`shadow.strategies.mine`: cannot build" in refusal("shadow.strategies=[{mine:{_target_:nowhere.Strategy}}]")


@pytest.mark.parametrize(
    ("overrides", "transport"),
    [
        ([], "disk"),
        (["engine.url=http://127.0.0.1:1"], "disk"),
        (["engine.url='http://[::1]:1'"], "disk"),
        (["engine.url=http://localhost:1"], "disk"),
        (["engine.url=http://10.0.0.7:1"], "gloo"),
        (["engine.url=http://node7:1"], "gloo"),
        (["engine.url=http://node7:1", "engine.server.publish_dir=."], "disk"),
        (["engine.url=http://node7:1", "engine.server.transport=nccl"], "nccl"),
        (["engine.server.transport=gloo"], "gloo"),
    ],
)
def test_weights_go_by_disk_where_the_server_certainly_sees_it(overrides, transport):
    config = check.load(compose("engine=sglang", "strategy=slice_concat", *overrides))
    check.check(config, check.build_strategies(config)[0])
    assert check.weight_transport(config.engine).value == transport


def test_the_server_brings_the_wall_clock():
    config = check.load(compose("engine=sglang", "strategy=slice_concat"))
    check.check(config, check.build_strategies(config)[0])
    assert (config.schedule.name, config.engine.delta_rows) == ("wall", True)
