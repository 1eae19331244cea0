"""What an operator sees and does at the page, in a browser, while clients ask."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from tests.server.page.conftest import OpenPage, clients, section, sign_in
from tests.support.administered import TOKEN, Operator, administered, change, status
from tests.support.ports import free_port
from tests.support.served import INFER, X, as_json, ask
from tests.support.tiny import SLOW, TinyArtifact, WriteWeights
from weightswap_runtime import DesiredStore, load
from weightswap_server.admin.operations import ModelOperations

HOSTILE = "<img src=x onerror=alert(1)><script>alert(1)</script>"


def wait(page: Any, name: str, text: str) -> None:
    section(page, name).get_by_text(text).first.wait_for()


def confirm(page: Any, button: str, why: str = "") -> None:
    """Confirm the dialog."""
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Why").fill(why)
    dialog.get_by_role("button", name=button).click()


def test_a_swap_under_load_is_seen(operator: Operator, open_page: OpenPage) -> None:
    """Without a reload: the new weights, user and reason, the mark in the charts, and the answers by weights."""
    page = open_page(operator)
    with clients(operator.server):
        wait(page, "load", "what is served")
        page.evaluate("""() => {
            window.drawn = [];
            const draw = CanvasRenderingContext2D.prototype.fillText;
            CanvasRenderingContext2D.prototype.fillText = function (text, ...where) {
                window.drawn.push(text);
                return draw.call(this, text, ...where);
            };
        }""")
        operator.change("swap", 2, why="loss 0.21")
        second = operator.status["served"]["weights_id"][:12]
        wait(page, "served", second)
        wait(page, "served", "generation 1")
        wait(page, "served", "loss 0.21")
        wait(page, "load", "others ")  # which have answered in the minute before
        page.wait_for_function("() => window.drawn.includes('gen 1')")
        wait(page, "history", "generation 0")
        assert page.title().startswith("tiny: generation 1")
        latency = section(page, "load").get_by_role("img", name="Latency").get_attribute("aria-label")
    assert "p99" in latency
    assert "s, highest" in latency
    receipt = section(page, "history").get_by_text("Receipt").first
    receipt.click()
    wait(page, "history", "seconds paused")


@pytest.mark.slow
def test_errors_of_clients_are_drawn(operator: Operator, open_page: OpenPage) -> None:
    page = open_page(operator)
    for _ in range(3):
        assert ask(operator.server, INFER, {"x": 1}).status == 400
    page.wait_for_function(r"""() => [...document.querySelectorAll("[role=img]")].some(
        (one) => /refused \(4xx\).*, highest [1-9]/.test(one.ariaLabel))""")


def test_a_refusal_says_why(operator: Operator, open_page: OpenPage, tmp_path: Path) -> None:
    page = open_page(operator)
    (tmp_path / "cut.safetensors").write_bytes(operator.file(2).read_bytes()[:-3])
    refused = operator.change("swap", tmp_path / "cut.safetensors").json
    wait(page, "history", refused["kind"])
    wait(page, "history", refused["error"])


@pytest.mark.slow
def test_what_is_staged_is_committed(operator: Operator, open_page: OpenPage) -> None:
    page = open_page(operator)
    wait(page, "staged", "Nothing is staged")
    staged = operator.change("stage", 2, why="try").json["status"]["staged"]
    section(page, "staged").get_by_role("button", name="Commit").click()
    dialog = page.get_by_role("dialog", name="Commit the staged weights?")
    dialog.get_by_text(staged["weights_id"][:12]).wait_for()
    dialog.get_by_text("This process alone").wait_for()
    assert operator.serves(1)  # until it is confirmed
    confirm(page, "Commit", "better")
    page.get_by_text(f"generation 1 serves {staged['weights_id'][:12]}").wait_for()
    wait(page, "served", "better")
    wait(page, "staged", "Nothing is staged")
    dialog.wait_for(state="detached")
    assert operator.serves(2)


@pytest.mark.slow
def test_what_has_changed_meanwhile_is_not_committed(operator: Operator, open_page: OpenPage) -> None:
    page = open_page(operator)
    seen = operator.change("stage", 2).json["status"]["staged"]["weights_id"]
    section(page, "staged").get_by_role("button", name="Commit").click()
    operator.change("discard")
    operator.change("stage", 3)
    page.get_by_role("alert").get_by_text("changed meanwhile").wait_for()
    assert page.get_by_role("dialog").get_by_role("button", name="Commit").is_disabled()
    refused = operator.change("commit", expect=seen)  # as the page would have asked, had it been faster
    assert (refused.status, refused.json["kind"]) == (409, "Conflict")
    page.keyboard.press("Escape")
    section(page, "staged").get_by_role("button", name="Discard").click()
    confirm(page, "Discard")
    wait(page, "staged", "Nothing is staged")
    assert operator.serves(1)


@pytest.mark.slow
def test_a_staging_is_shown_and_broken_off(operator: Operator, open_page: OpenPage) -> None:
    page = open_page(operator)
    with ThreadPoolExecutor(1) as pool:
        staging = pool.submit(operator.change, "stage", 2, rate_limit=SLOW)
        section(page, "staged").get_by_role("progressbar").wait_for()
        section(page, "staged").get_by_role("button", name="Abort").click()
        confirm(page, "Discard")
        assert staging.result(120).status == 409
    wait(page, "staged", "Nothing is staged")


def test_a_rollback_to_what_was_chosen_holds(
    operator: Operator, open_page: OpenPage, desired_store: DesiredStore
) -> None:
    operator.follow(desired_store, 0.02)
    page = open_page(operator)
    for seed in (2, 3):
        operator.change("swap", seed)
    first = operator.model.history[0].weights_id
    section(page, "following").get_by_text("3", exact=True).wait_for()  # a dialog says what was so when it was opened
    page.get_by_role("button", name=f"Roll back to generation 0, {first[:12]}").click()
    page.get_by_role("dialog").get_by_text("which has revision 3").wait_for()
    confirm(page, "Roll back", "tags are slow")
    page.get_by_text(f"serves {first[:12]}").wait_for()
    wait(page, "following", "on hold")
    wait(page, "following", "tags are slow")
    state = desired_store.read()
    assert (state.weights.weights_id, state.weights.why, state.hold.why) == (first, "tags are slow", "tags are slow")
    assert operator.serves(1)
    section(page, "following").get_by_role("button", name="Release").click()
    confirm(page, "Release")
    section(page, "following").get_by_role("button", name="Hold").click()
    assert desired_store.read().hold is None
    confirm(page, "Hold", "a quiet evening")
    wait(page, "following", "a quiet evening")
    assert desired_store.read().hold.by == "token"


def test_what_was_withdrawn_or_refused_is_called_that(
    operator: Operator, open_page: OpenPage, desired_store: DesiredStore, tiny: TinyArtifact
) -> None:
    """No button leads to what was refused; what is refused only then is said in the dialog, and nothing is written."""
    values = tiny.values(2) | {"bias": torch.full((5,), torch.nan)}
    nan = desired_store.set(tiny.write(operator.file(1).with_name("nan.safetensors"), values), revision=1, by="bo")
    desired_store.set(operator.file(3), revision=2, by="ana")
    desired_store.set(operator.file(4), revision=3, by="ana")
    operator.follow(desired_store, 0.02)
    model = operator.model
    assert model.watching[0].wait(20, revision=4)
    page = open_page(operator, expected="422")
    page.get_by_role("button", name=f"Roll back to {nan.weights_id[:12]}").click()
    before = desired_store.read()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("which has revision 4").wait_for()
    confirm(page, "Roll back")
    dialog.get_by_role("alert").get_by_text("NonFiniteWeights: ").wait_for()
    assert [each.text_content() for each in dialog.get_by_role("alert").all()] == [
        f"NonFiniteWeights: {model_refusals(operator)[-1]}"
    ]
    assert desired_store.read() == before
    page.keyboard.press("Escape")
    entry = section(page, "history").get_by_role("listitem").filter(has_text=nan.weights_id[:12]).first
    entry.get_by_text("refused", exact=True).wait_for()
    entry.get_by_text("bias: 5 NaN").wait_for()
    assert entry.get_by_role("button", name="Roll back").count() == 0

    page.get_by_role("button", name=f"Roll back to generation 0, {model.history[0].weights_id[:12]}").click()
    confirm(page, "Roll back")
    page.get_by_text(f"serves {model.history[0].weights_id[:12]}").wait_for()
    entry.get_by_text("withdrawn", exact=True).wait_for()
    assert entry.get_by_role("button", name="Roll back").count() == 0
    entries = section(page, "history").get_by_role("listitem")
    never_served = entries.filter(has_text="not served by this process").filter(
        has_text=before.history[-1].weights_id[:12]
    )
    never_served.get_by_text("withdrawn", exact=True).wait_for()
    committed = entries.filter(has_text="generation 1").filter(has_text=before.weights_id[:12])
    committed.get_by_text("withdrawn", exact=True).wait_for()
    assert committed.get_by_role("button", name="Roll back").count() == 1
    assert operator.serves(1)


def model_refusals(operator: Operator) -> list[str]:
    assert operator.server.admin is not None
    return [each.error for each in operator.server.admin.models["tiny"].journal.refusals if each.kind]


def test_a_long_refusal_is_folded(operator: Operator, open_page: OpenPage, tmp_path: Path) -> None:
    """Its beginning and what to do stay; and there is no section of what the model does not have."""
    page = open_page(operator)
    save_file({f"layer.{desired_store}": torch.ones(1) for desired_store in range(20)}, tmp_path / "many.safetensors")
    refused = operator.change("swap", tmp_path / "many.safetensors").json["error"]
    entry = section(page, "history").get_by_role("listitem").first
    entry.get_by_text(refused.splitlines()[-1]).wait_for()
    folded = entry.get_by_text("layer.7: unexpected")
    assert not folded.is_visible()
    entry.get_by_text("more lines").click()
    folded.wait_for()
    assert page.get_by_role("heading", name="variants").count() == 0


def test_the_history_of_an_earlier_server(
    tiny: TinyArtifact, weight_file: WriteWeights, desired_store: DesiredStore, open_page: OpenPage
) -> None:
    desired_store.set(weight_file(2), revision=1, by="bo", why="the second")
    model = load(tiny.path)
    model.follow(desired_store.where, interval=0.1)
    with administered({"tiny": model}) as server:
        assert server.admin is not None
        wait(open_page(server.admin.where), "history", "desired by ana, before this process was started")


@pytest.mark.slow
def test_what_the_server_refuses_is_said_in_the_dialog(operator: Operator, open_page: OpenPage) -> None:
    operator.change("swap", 2)
    page = open_page(operator, expected="422")
    operator.file(1).unlink()
    page.get_by_role("button", name="Roll back to generation 0").click()
    confirm(page, "Roll back")
    said = page.get_by_role("alert").text_content()
    assert said.startswith("WeightFileError: ")
    assert "v1.safetensors" in said
    assert page.get_by_role("dialog").is_visible()
    assert operator.serves(2)


@pytest.mark.slow
def test_a_canary_is_shown_and_promoted(operator: Operator, open_page: OpenPage) -> None:
    page = open_page(operator)
    with clients(operator.server):
        operator.change("canary", 2, share=0.5, shadow=True, promote_if="requests > 1e9")
        wait(page, "canary", "requests > 1e9")
        wait(page, "canary", "answers 50 %, shadow")
        wait(page, "canary", "compared, 100 % differ")
        wait(page, "load", "the canary")
        section(page, "staged").get_by_role("button", name="Promote").click()
        confirm(page, "Commit")
        wait(page, "served", "generation 1")
    section(page, "canary").wait_for(state="detached")
    assert operator.serves(2)


@pytest.mark.slow
def test_a_token_is_asked_for(operator: Operator, open_page: OpenPage) -> None:
    page = open_page(operator, token=None, expected="401")
    for wrong in ("no-such-token-at-all", "ÄÖÜ" * 8):
        sign_in(page, wrong)
        page.get_by_role("alert").wait_for()
        assert page.locator("#served").count() == 0
    sign_in(page, TOKEN)
    page.wait_for_selector("#served")
    assert TOKEN not in page.url
    assert page.evaluate("JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie])") == '[{},{},""]'
    page.reload()
    page.get_by_label("keep it until this tab is closed").check()
    sign_in(page, TOKEN)
    page.wait_for_selector("#served")
    page.reload()
    page.wait_for_selector("#served")
    page.get_by_role("button", name="Forget the token").click()
    page.get_by_label("Token").wait_for()
    assert page.evaluate("sessionStorage.length") == 0


@pytest.mark.slow
def test_a_server_that_goes_and_comes_back(
    tiny: TinyArtifact, weight_file: WriteWeights, open_page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, paths = free_port(), [weight_file(1), weight_file(2)]
    with administered({"tiny": load(tiny.path, paths[0])}, port=port):
        page = open_page(f"http://127.0.0.1:{port}", expected="Failed to load resource")
        page.get_by_text("live", exact=True).wait_for()
    page.get_by_text("no connection; trying again").wait_for()
    assert section(page, "served").is_visible()  # as it was
    with administered({"tiny": load(tiny.path, paths[1])}, port=port) as server:
        wait(page, "served", status(server)["served"]["weights_id"][:12])
        page.get_by_text("live", exact=True).wait_for()
    monkeypatch.setenv("WEIGHTSWAP_ADMIN_TOKEN", "another-token-by-now")
    with administered({"tiny": load(tiny.path, paths[1])}, port=port):
        page.get_by_label("Token").wait_for()
        page.get_by_role("alert").get_by_text("the bearer token is not valid").wait_for()


@pytest.mark.slow
def test_texts_of_others_are_texts(operator: Operator, tiny: TinyArtifact, open_page: OpenPage, tmp_path: Path) -> None:
    page = open_page(operator)
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    (folder := tmp_path / "<img src=x onerror=alert(1)>").mkdir()
    labels = {HOSTILE: HOSTILE, "__proto__": "x", "constructor": "y"}
    hostile = tiny.write(folder / "<b>.safetensors", tiny.values(2), labels=labels)
    cut = folder / "<i>.safetensors"
    cut.write_bytes(hostile.read_bytes()[:-3])
    operator.change("swap", cut, why=HOSTILE)
    operator.change("stage", hostile, why=HOSTILE)
    wait(page, "staged", HOSTILE)
    section(page, "staged").get_by_role("button", name="Commit").click()
    confirm(page, "Commit", HOSTILE)
    wait(page, "served", HOSTILE)
    wait(page, "history", "WeightFileError")
    assert page.locator("img, b > img, body script, q *, .labels b").count() == 0


@pytest.mark.slow
def test_several_models_and_none_that_is_served(
    tiny: TinyArtifact, weight_file: WriteWeights, open_page: OpenPage
) -> None:
    with administered({"tiny": load(tiny.path, weight_file(1)), "other": load(tiny.path)}, warm=False) as server:
        assert server.admin is not None
        page = open_page(server.admin.where)
        page.get_by_role("link", name="other").click()
        wait(page, "served", "Nothing is served yet")
        wait(page, "served", f"weightswap push {server.admin.where} v1.safetensors")
        wait(page, "history", "Nothing was committed or refused yet")
        change(server, "swap", "other", source="x")  # which is not allowed
        server.service.served[1].model.swap(weight_file(2))
        wait(page, "served", "generation 0")
        assert ask(server, "/v2/models/other/infer", as_json(x=X)).status in (200, 503)
        wait(page, "load", "what is served")


@pytest.mark.slow
def test_what_only_a_later_server_says_is_shown(
    operator: Operator, open_page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = ModelOperations.status
    later = {"spare_parts": {"wheels": 3, "rims": None}}
    monkeypatch.setattr(ModelOperations, "status", lambda one: msgspec.to_builtins(known(one)) | later)
    page = open_page(operator)
    page.get_by_role("heading", name="spare parts").wait_for()
    assert section(page, "other-spare_parts").locator("dl").text_content().split() == ["wheels3"]
