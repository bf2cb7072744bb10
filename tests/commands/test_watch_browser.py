"""The live page in a real browser: it follows files, filters, and survives hostile responses."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Tab, open_browser
from test_watch import add_step, served, write_run

from jzero.run.metrics_writer import MetricsWriter

ARTICLES = "document.querySelectorAll('article').length"
STEP = "document.querySelector('#rollouts + div b').textContent"


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    with open_browser(tmp_path / "profile") as opened:
        yield opened
        assert opened.errors == []


def choose(tab: Tab, label: str, value: str) -> None:
    """Sets a control of the page as a user does."""
    done = tab.evaluate(
        f"""(() => {{
            const control = document.querySelector('[aria-label="{label}"]');
            if (control.type === "checkbox") control.checked = {json.dumps(value == "true")};
            else control.value = {json.dumps(value)};
            control.dispatchEvent(new Event("input"));
            control.dispatchEvent(new Event("change"));
            return true;
        }})()"""
    )
    assert done


def articles(tab: Tab) -> list[str]:
    return tab.evaluate("[...document.querySelectorAll('article')].map(e => e.innerText)")


def test_the_page_follows_a_growing_file(tmp_path: Path, tab: Tab) -> None:
    run = write_run(tmp_path / "run", 3)
    with served(run) as url:
        tab.open(url)
        tab.wait_for(f"{ARTICLES} === 2 && {STEP} === 'step 3'")
        assert "3 of 100" in tab.text()
        writer = MetricsWriter(run, 3)
        for step in (4, 5):
            add_step(writer, step)
            tab.wait_for(f"{STEP} === 'step {step}'")
            tab.wait_for(f"document.body.innerText.includes('{step} of 100')")
            tab.wait_for(f"{ARTICLES} && document.body.innerText.includes('say {step} 1')")
            assert len(articles(tab)) == 2
        # The reader has gone back to an older step, and stays there.
        tab.evaluate("document.querySelector('[aria-label=\"previous step\"]').click()")
        tab.wait_for(f"{STEP} === 'step 4'")
        tab.wait_for("document.body.innerText.includes('say 4 1')")
        add_step(writer, 6)
        tab.wait_for("document.body.innerText.includes('6 of 100')")
        assert tab.evaluate(STEP) == "step 4"
        writer.close()
        assert {re.sub(r"\?.*", "", address) for address in tab.requests} == {
            url, f"{url}state", f"{url}index", f"{url}rows"
        }  # fmt: skip

        # A resumed run drops steps.
        MetricsWriter(run, 2).close()
        tab.wait_for("document.body.innerText.includes('2 of 100')")
        choose(tab, "newest step", "true")
        tab.wait_for(f"{STEP} === 'step 2'")


def test_the_page_follows_a_run_of_ten_minutes(tmp_path: Path, tab: Tab) -> None:
    """A step every two seconds: the page keeps up, and its memory does not grow with the steps."""
    run = write_run(tmp_path / "run", 3)
    seconds, pause = 600, 2
    delays, heaps = [], []
    with served(run) as url:
        tab.open(url)
        tab.wait_for(f"{ARTICLES} === 2 && {STEP} === 'step 3'")
        writer = MetricsWriter(run, 3)
        began = time.monotonic()
        step = 3
        while time.monotonic() < began + seconds:
            step += 1
            add_step(writer, step)
            written = time.monotonic()
            tab.wait_for(f"{STEP} === 'step {step}'")
            tab.wait_for(f"document.body.innerText.includes('say {step} 1')")
            delays.append(time.monotonic() - written)
            if step % 20 == 0:
                tab.send("HeapProfiler.collectGarbage")
                heaps.append(tab.send("Runtime.getHeapUsage")["usedSize"])
            time.sleep(pause)
        writer.close()
        assert tab.evaluate("performance.getEntriesByType('navigation').length") == 1
    print(
        f"{step} steps in {seconds} s, shown after {sorted(delays)[len(delays) // 2]:.1f} s "
        f"(median), {max(delays):.1f} s (longest); JavaScript heap {heaps[0] / 2**20:.1f} MiB "
        f"at first, {heaps[-1] / 2**20:.1f} MiB at the end"
    )
    assert max(delays) < 30
    # The curves have some numbers for each step; rollouts of earlier steps are not kept.
    assert heaps[-1] < heaps[0] + 20 * 2**20


def test_two_runs_filters_and_search(tmp_path: Path, tab: Tab) -> None:
    one, two = write_run(tmp_path / "one", 9, samples=4), write_run(tmp_path / "two", 3)
    with (one / "samples.jsonl").open("a") as file:
        row = {"step": 10, "id": "p/0", "sample": 1, "prompt": [{"role": "user", "content": "Q?"}]}
        row |= {"response": "needle " * 50, "gold": 1, "score": 0.0, "reason": "wrong value"}
        row |= {"correct": False, "finish": "length", "tokens": 999, "advantage": -1, "group": 0}
        row |= {"rewards": {"my.py:f": 0.25, "format": 1.0}, "logps": [-0.1, None, -3.0]}
        row |= {"token_texts": ["nee", "dle", " "], "ages": [0, 0, 2], "token_advantages": -1}
        file.write(json.dumps(row) + "\n")
    with served(one, two) as url:
        tab.open(url)
        tab.wait_for(f"{ARTICLES} === 1")
        [shown] = articles(tab)
        assert "my.py:f 0.25" in shown and "format 1" in shown and "finish length" in shown
        colors = "[...document.querySelectorAll('.token')].map(e => e.style.background)"
        by_logp = tab.evaluate(colors)
        assert len(by_logp) == 2 and by_logp[0] != by_logp[1]
        choose(tab, "color tokens by", "age")
        tab.wait_for(f"JSON.stringify({colors}) !== {json.dumps(json.dumps(by_logp))}")
        assert "user\nQ?" in tab.text()

        # Curves of both runs, on another axis.
        lines = "document.querySelector('#curves + div svg').querySelectorAll('path').length"
        assert tab.evaluate(lines) == 2
        choose(tab, "x axis", "hours")
        assert "hours" in tab.evaluate("document.querySelector('#curves + div svg').textContent")
        choose(tab, "log axis", "true")
        choose(tab, "smoothing", "0.9")
        assert tab.evaluate(lines) == 4
        tab.evaluate("document.querySelector('#legend input').click()")
        assert tab.evaluate(lines) == 2

        # Filters over all steps: of 9 steps with 4 rollouts each, the first is wrong.
        choose(tab, "all steps", "true")
        tab.wait_for("document.body.innerText.includes('37 rollouts of all steps')")
        for filtered, count in (("wrong", 10), ("cut", 1), ("changed", 1), ("right", 27)):
            choose(tab, "show", filtered)
            tab.wait_for(f"document.body.innerText.includes('{count} rollouts of all steps')")
        choose(tab, "show", "all")
        choose(tab, "order", "longest")
        tab.wait_for("document.querySelector('article').innerText.includes('tokens 999')")
        choose(tab, "search", "NEEDLE")
        tab.wait_for(f"{ARTICLES} === 1")
        choose(tab, "search", "")
        choose(tab, "all steps", "false")
        tab.wait_for(f"{STEP} === 'step 10'")

        # One problem over all steps: steps 3, 6, 9 and 10.
        tab.evaluate(
            "[...document.querySelectorAll('.link')]"
            ".find(link => link.innerText.includes('over all')).click()"
        )
        tab.wait_for("document.body.innerText.includes('13 rollouts of the problem p/0')")
        choose(tab, "run", "1")
        tab.wait_for(f"{STEP} === 'step 3'")


def test_rollouts_by_a_single_part_of_the_reward(tmp_path: Path, tab: Tab) -> None:
    run = write_run(tmp_path / "one", 1)
    hostile = "</option><script>window.taken = 1</script>"
    all_parts = [{"format": 0.5, "short": 1}, {"format": 1}, {"short": 2, hostile: 3}, {}]
    with (run / "samples.jsonl").open("a") as file:
        for number, parts in enumerate(all_parts):
            row = {"step": 2, "id": f"p/{number}", "sample": 0, "prompt": "Q?", "response": "A."}
            row |= {"gold": 1, "score": 0.0, "reason": "wrong", "finish": "stop", "tokens": 9}
            file.write(json.dumps(row | {"group": number, "rewards": parts}) + "\n")

    with served(run) as url:
        tab.open(url)
        tab.wait_for(f"{ARTICLES} === 4")
        for order, count, first in (
            ("highest part format", 2, "format 1"),
            ("lowest part format", 2, "format 0.5"),
            ("lowest part short", 2, "short 1"),
            (f"highest part {hostile}", 1, "short 2"),
        ):
            choose(tab, "order", order)
            tab.wait_for(f"{ARTICLES} === {count}")
            tab.wait_for(f"document.querySelector('article').innerText.includes('{first}')")
        choose(tab, "order", "group")
        tab.wait_for(f"{ARTICLES} === 4")
        assert tab.evaluate("window.taken === undefined")


HOSTILE = [
    "</script><script>document.title = 'taken'; window.taken = 1</script>",
    "<img src=x onerror=\"window.taken = 1\"><svg onload='window.taken = 1'>",
    "a lone \ud800, a NUL \0, an escape \x1b[2J, a \r return, \u2028 and \u202e bidi \u2066 \ufeff",
    "x" * 10_000_000,
    "<style>* { display: none }</style><a href='javascript:window.taken=1'>",
    "\u0301" * 50_000,
]


def test_hostile_rollouts_run_nothing_and_break_nothing(tmp_path: Path, tab: Tab) -> None:
    run = write_run(tmp_path / "run", 1)
    with (run / "samples.jsonl").open("a") as file:
        for response in HOSTILE:
            text = response[:100_000]
            row = {"step": 2, "id": text[:300], "sample": 0, "prompt": text, "response": response}
            row |= {"gold": {text[:50]: text}, "score": 1, "reason": text, "tokens": 5, "group": 1}
            row |= {"rewards": {text[:99]: text}, "finish": text, "advantage": "much", "task": text}
            row |= {"token_texts": [text[:500]] * 5000, "logps": [0.5] * 5000, "ages": text}
            file.write(json.dumps(row) + "\n")
        file.write(json.dumps({"step": 2, "turns": [None], "response": 5, "prompt": [None]}) + "\n")
        file.write('{"step": 2, "logps": 7, "token_texts": 3, "response": "r", "prompt": {}}\n')
        file.write("\0\xff not JSON\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, f"reward/{HOSTILE[0]}": 1.0, "__proto__": 2.0}) + "\n")
    (run / "config.json").write_text(json.dumps({"name": HOSTILE[0], "train": {"steps": 9}}))
    (run / "versions.json").write_text(json.dumps({"jax": HOSTILE[1], "device": HOSTILE[2]}))
    with served(run) as url:
        tab.open(url)
        tab.wait_for(f"{ARTICLES} === 8")
        assert tab.evaluate("window.taken === undefined && document.title !== 'taken'")
        text = tab.text()
        assert "window.taken = 1</script>" in text
        assert "characters are left out here" in text
        assert "\u2400" in text and "\u27e8U+202E\u27e9" in text and "\u202e" not in text
        assert (
            tab.evaluate("document.querySelectorAll('main script, main img, main a').length") == 0
        )
        assert len(tab.evaluate("document.body.innerHTML")) < 8_000_000
        choose(tab, "show", "wrong")
        tab.wait_for("document.body.innerText.includes('8 rollouts of step 2')")
        choose(tab, "all steps", "true")
        tab.wait_for("document.body.innerText.includes('9 rollouts of all steps')")
