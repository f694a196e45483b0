"""The diagnosis commands: recorded replies are described or refused, a server is probed (a stand-in, sglang_kit.py)."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from experiments.engines.sglang.__main__ import main
from tests.unit.engine_kit import model_of, teacher_forced
from tests.unit.sglang_cases import RECORDED
from tests.unit.sglang_kit import LoopbackServer, loopback_server


def test_check_says_what_a_reply_holds_and_why_one_is_refused(capsys):
    good = RECORDED / "0.5.23" / "retract.json"
    assert main(["check", str(good)]) == 0
    assert (
        "retract.json: length, 5 input and 120 new tokens; 124 rows from position 0 on (5292 characters); log-probs "
        "-6.13 to -4.78; versions 7 [0, 36), 8 [36, 120); 1 retractions; flags mixed_version_call"
    ) in capsys.readouterr().out
    assert main(["check", str(good), str(RECORDED / "0.5.23" / "empty_prompt.json")]) == 1
    refused = capsys.readouterr().out.splitlines()[1]
    assert refused.startswith("REFUSED  ")
    assert "input_ids cannot be empty" in refused


def test_check_exits_2_for_what_is_no_recording(tmp_path, capsys):
    (tmp_path / "a.json").write_text("{}")
    assert main(["check", str(tmp_path / "a.json")]) == 2
    assert "an object with request, response and model expected; no request, response, model" in capsys.readouterr().err
    assert main(["check", str(tmp_path / "missing.json")]) == 2
    assert main(["check", "--checkpoint", str(tmp_path), str(RECORDED / "0.5.23" / "complete.json")]) == 2
    assert "no Hugging Face checkpoint" in capsys.readouterr().err


@pytest.fixture
def server():
    with loopback_server() as running:
        yield running


def probe(server: LoopbackServer, *options: str) -> int:
    return main(["probe", server.url, "--layers", "3", "--top-k", "2", "--experts", "8", *options])


def test_probe_finds_nothing_wrong_with_a_server_that_honours_the_contract(server, capsys):
    assert probe(server, "--pauses") == 0
    printed = capsys.readouterr().out
    assert "FAIL" not in printed
    for found in (
        "rows, log-probs and token ids of one request agree: length, 7 input and 12 new tokens; 18 rows",
        "rows from a position on: length, 19 input and 2 new tokens; 2 rows from position 18 on",
        "pause in_place: length",
        "pause retract: length",
        "pause abort: ",
    ):
        assert found in printed


def test_probe_stays_within_a_short_context(server, capsys):
    """The smoke preset's model has 64 positions, of which SGLang 0.5.23 takes 58."""
    server.settings["max_req_input_len"] = 58
    assert probe(server, "--pauses") == 0
    assert "pause retract: length, 7 input and 51 new tokens" in capsys.readouterr().out
    assert max(len(body["input_ids"]) + body["sampling_params"]["max_new_tokens"] for body in server.bodies) == 58
    assert not server.paused


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            lambda s: s.settings.update(enable_return_routed_experts=False),
            "start it with --enable-return-routed-experts",
        ),
        (lambda s: setattr(s, "top_k", 3), "27 came"),
        (lambda s: s.faults.update({"/generate": ["drop"]}), "/generate: RemoteProtocolError"),
        (lambda s: s.faults.update({"/generate": [(500, {"error": {"message": "boom"}})]}), "boom"),
    ],
)
def test_probe_fails_for_a_server_that_does_not(server, capsys, fault, message):
    fault(server)
    assert probe(server) == 1
    assert message in capsys.readouterr().out


def test_probe_notes_what_is_unusual_but_usable(server, capsys):
    server.version = "default"
    whole = server.reply
    server.reply = lambda body, *rest: whole({**body, "routed_experts_start_len": 0}, *rest)
    assert probe(server) == 0
    printed = capsys.readouterr().out
    assert "note routed_experts_start_len is ignored" in printed
    assert "note no version per token" in printed
    assert "note pauses were not tried" in printed


def test_probe_tells_log_probs_of_another_model(server, capsys, tmp_path):
    """Routes do not depend on the last layer: rows alone would be found in order."""
    model = model_of(seed=0)
    model.save_pretrained(str(tmp_path))
    reply = server.reply

    def with_the_models_rows(body, versions, *rest):
        answer = reply(body, versions, *rest)
        tokens = np.array([*body["input_ids"], *answer["output_ids"]], dtype=np.int32)
        rows = teacher_forced(model, tokens, temperature=1.0)[1][body["routed_experts_start_len"] :]
        answer["meta_info"]["routed_experts"] = base64.b64encode(rows.astype("<i4").tobytes()).decode()
        return answer

    server.reply = with_the_models_rows
    assert probe(server, "--checkpoint", str(tmp_path)) == 1
    printed = capsys.readouterr().out
    assert "0 of 54 cells have other experts" in printed
    assert "these are not this model's log-probs" in printed


def test_probe_tells_rows_of_another_model(server, capsys, tmp_path):
    """The stand-in's rows are no model's: every count is right, only the comparison shows it."""
    model = model_of(seed=0)
    model.save_pretrained(str(tmp_path))
    assert probe(server, "--checkpoint", str(tmp_path)) == 1
    assert "these are not this model's rows" in capsys.readouterr().out


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://a", "http://a:b", "http://"])
def test_probe_exits_2_for_what_is_no_url(url, capsys):
    assert main(["probe", url]) == 2
    assert f"error: http(s)://HOST:PORT expected, {url} came" in capsys.readouterr().err


def test_a_checkpoint_of_another_model_is_told_from_wrong_rows(server, capsys, tmp_path):
    model_of(seed=0, num_hidden_layers=2).save_pretrained(str(tmp_path))
    assert main(["check", "--checkpoint", str(tmp_path), str(RECORDED / "0.5.23" / "complete.json")]) == 2
    assert "2 layers and 2 experts per token expected, its rows have 4 and 2" in capsys.readouterr().err
    assert probe(server, "--checkpoint", str(tmp_path)) == 1
    assert "FAIL" in (printed := capsys.readouterr().out)
    assert "its rows have 3 and 2" in printed
    model_of(seed=0, num_hidden_layers=4).save_pretrained(str(tmp_path))
    assert main(["check", "--checkpoint", str(tmp_path), str(RECORDED / "0.5.23" / "complete.json")]) == 2
    assert "ids below 32 expected" in capsys.readouterr().err


def test_probe_needs_the_sizes_of_the_model(server, capsys):
    assert main(["probe", server.url]) == 1
    assert "give --checkpoint, or --layers, --top-k and --experts" in capsys.readouterr().out
    assert main(["probe", server.url, "--layers", "3"]) == 2


def test_check_with_a_checkpoint_finds_rows_that_only_the_model_can_tell(tmp_path, capsys):
    """A recording of the seeded model itself, and the same with two positions exchanged."""
    model = model_of(seed=0)
    model.save_pretrained(str(tmp_path))
    tokens = np.arange(1, 13, dtype=np.int32)
    log_probs, rows = teacher_forced(model, tokens, temperature=1.0)

    def write(name, rows, log_probs=log_probs):
        meta = {
            "finish_reason": {"type": "length", "length": 8},
            "output_token_logprobs": [[float(p), int(t), None] for p, t in zip(log_probs[3:], tokens[4:], strict=True)],
            "routed_experts": base64.b64encode(rows.astype("<i4").tobytes()).decode(),
        }
        case = {
            "model": {"num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2},
            "request": {
                "input_ids": tokens[:4].tolist(),
                "sampling_params": {"max_new_tokens": 8},  # SGLang samples at temperature 1 then
                "return_routed_experts": True,
            },
            "response": {"output_ids": tokens[4:].tolist(), "meta_info": meta},
        }
        (tmp_path / name).write_text(json.dumps(case))
        return main(["check", "--checkpoint", str(tmp_path), str(tmp_path / name)])

    assert write("right.json", rows) == 0
    assert "0 of 33 cells differ" in capsys.readouterr().out
    assert write("other_head.json", rows, log_probs - 0.1) == 1, "the routes are right, the log-probs are not"
    assert "WRONG" in (printed := capsys.readouterr().out)
    assert "0 of 33 cells differ" in printed
    rows[[2, 5]] = rows[[5, 2]]
    assert write("wrong.json", rows) == 1
    assert "WRONG" in (printed := capsys.readouterr().out)
    assert "positions 2, 5" in printed
