"""An AnyWidget in a browser page without JupyterLab: its script runs there, its traits and messages reach Python."""

import time
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import torch

from normlab import NormlabConfig, NormlabForCausalLM

TOKENS = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))


def model_of(scheme: str, depth: int = 3, **fields: Any) -> NormlabForCausalLM:
    """A small untrained model that can read TOKENS."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 50}
    sizes |= {"num_hidden_layers": depth, "max_position_embeddings": 12}
    return NormlabForCausalLM(NormlabConfig(scheme=scheme, **sizes | fields)).eval()


# A model as anywidget gives it to a script. `kernel` is Python.
MOUNT = """([esm, css, traits, weights]) => {
    document.head.append(Object.assign(document.createElement('style'), { textContent: css }));
    const heard = {}, values = { ...traits }, changed = new Set();
    const tell = (name, ...args) => (heard[name] ?? []).forEach(act => act(...args));
    if (weights) values.weights = new DataView(Uint8Array.from(atob(weights), c => c.charCodeAt(0)).buffer);
    window.take = update => {
        Object.assign(values, update);
        for (const name of Object.keys(update)) tell(`change:${name}`);
    };
    window.message = content => tell('msg:custom', content);
    const model = {
        get: name => values[name],
        set(name, value) { values[name] = value; changed.add(name); tell(`change:${name}`); },
        save_changes() {
            window.kernel({ set: Object.fromEntries([...changed].map(name => [name, values[name]])) });
            changed.clear();
        },
        on(name, act) { (heard[name] ??= []).push(act); },
        off(name, act) { heard[name] = (heard[name] ?? []).filter(other => other !== act); },
        send: content => window.kernel({ message: content }),
    };
    const el = document.createElement('div');
    document.body.append(el);
    const module = URL.createObjectURL(new Blob([esm], { type: 'text/javascript' }));
    return import(module).then(({ default: widget }) => { widget.render({ model, el }); });
}"""
FRAMEWORK = {"comm", "layout", "tabbable", "tooltip", "weights"}


class Mounted:
    """A widget shown in a page. `until` lets both sides talk until a condition holds; `push` sends Python's traits."""

    def __init__(self, page: Any, widget: Any) -> None:
        self.page, self.widget, self.answers = page, widget, []
        self.names = [n for n in widget.traits(sync=True) if not n.startswith("_") and n not in FRAMEWORK]
        widget.send = lambda content, buffers=None: self.answers.append(content)
        page.goto("about:blank")
        page.expose_binding("kernel", self._kernel)
        weights = b64encode(getattr(widget, "weights", b"")).decode()
        traits = self._traits() | {"_plotly": getattr(widget, "_plotly", None)}
        page.evaluate(MOUNT, [str(widget._esm), str(widget._css), traits, weights])

    def _traits(self) -> dict[str, Any]:
        return {name: getattr(self.widget, name) for name in self.names}

    def _kernel(self, _: Any, content: dict[str, Any]) -> None:
        for name, value in content.get("set", {}).items():
            setattr(self.widget, name, value)
        if "message" in content:
            self.widget._handle_custom_msg(content["message"], [])

    def push(self, just_before: str = "() => {}") -> None:
        self.page.evaluate(f"traits => {{ ({just_before})(); window.take(traits); }}", self._traits())

    def until(self, condition: str | Callable[[], bool], argument: Any = None, seconds: float = 20) -> None:
        """Until the page's condition, a script, or Python's holds."""
        end = time.monotonic() + seconds
        while not (condition() if callable(condition) else self.page.evaluate(condition, argument)):
            assert time.monotonic() < end, (condition, argument)
            self.page.wait_for_timeout(20)
            while self.answers:
                self.page.evaluate("window.message", self.answers.pop(0))
