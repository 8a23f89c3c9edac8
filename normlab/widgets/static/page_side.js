/* What a notebook's page does for every widget of normlab: keys on its controls are the reader's, controls and plots have names
   for who does not see them, and the widget follows JupyterLab's theme. */
const CONTROLS = "select, input, button, .noUi-handle";

function plain(text) {
  return new DOMParser().parseFromString(text.replace(/<br\s*\/?>/g, ", "), "text/html").body.textContent.trim();
}

function setAttribute(element, name, value) {
  if (value && element.getAttribute(name) !== value) element.setAttribute(name, value);
}

function annotate(root) {
  // On the control itself: JupyterLab's commands are for whatever has the focus (r makes a cell raw, d d deletes it).
  for (const control of root.querySelectorAll(CONTROLS)) setAttribute(control, "data-lm-suppress-shortcuts", "true");
  for (const handle of root.querySelectorAll(".noUi-handle")) {
    const slider = handle.closest(".jupyter-widgets");
    setAttribute(handle, "aria-label", slider?.querySelector(".widget-label")?.textContent.trim());
    setAttribute(handle, "aria-valuetext", slider?.querySelector(".widget-readout")?.textContent.trim());
  }
  for (const plot of root.querySelectorAll(".js-plotly-plot")) {
    const { title, annotations = [] } = plot.layout ?? {};
    const drawing = plot.querySelector(".main-svg"); // not the plot: its buttons are no part of an image
    const name = plain(title?.text || annotations.map(note => note.text).join("<br>"));
    if (!drawing || !name) continue;
    setAttribute(drawing, "role", "img");
    setAttribute(drawing, "aria-label", name);
  }
}

/* Look after `root`, and after all that appears in it; returns how to stop. */
function attend(root) {
  let frame = null;
  const later = () => { frame ??= requestAnimationFrame(() => { frame = null; annotate(root); }); };
  const observer = new MutationObserver(later);
  // A slider writes its own idea of aria-valuetext (a place in a list, a power of two) whenever it is moved.
  observer.observe(root, { subtree: true, childList: true, attributes: true, attributeFilter: ["aria-valuetext"] });
  annotate(root);
  return () => {
    observer.disconnect();
    cancelAnimationFrame(frame);
  };
}

/* Call `act` with whether the page is dark, now and when that changes; returns how to stop. On a dark page text is bright: so in
   JupyterLab, VS Code, Colab and marimo, each with its own names for themes. */
function followTheme(element, act) {
  let dark = null;
  const look = () => {
    const [red, green, blue] = getComputedStyle(element.isConnected ? element : document.body).color.match(/[\d.]+/g).map(Number);
    const now = 0.3 * red + 0.6 * green + 0.1 * blue > 127;
    if (now !== dark) act(dark = now);
  };
  const themes = new MutationObserver(look);
  for (const part of [document.documentElement, document.body]) themes.observe(part, { attributes: true });
  look();
  return () => themes.disconnect();
}

/* plotly, from the widget's trait; one for all widgets of the notebook. */
function library(model) {
  const lines = ["const module = { exports: {} }, exports = module.exports, define = undefined;", model.get("_plotly"), "export default module.exports;"];
  const address = () => URL.createObjectURL(new Blob([lines.join("\n")], { type: "text/javascript" }));
  return globalThis.normlabPlotly ??= import(address()).then(module => module.default);
}

/* A widget that is a page. `names` says which trait of the model holds which part of the page's state.
   `begin(root, host)` makes the page. Its host has `dark`, `read` and `write` for the state, and `ask` for the kernel. */
const TELL_AFTER_MS = 120; // Python hears once the reader rests: a message takes time that the next move needs

function widgetOf(names, begin) {
  return { render({ model, el }) {
    const root = el.appendChild(document.createElement("div")), waiting = new Map(), known = {};
    const traits = Object.entries(names);
    let saved = null;
    const read = () => Object.fromEntries(traits.map(([name, trait]) => [name, model.get(trait)])); // null is a state too
    for (const [name, trait] of traits) known[name] = JSON.stringify(model.get(trait));
    const say = () => {
      const state = page.state();
      for (const [name, trait] of traits) {
        const text = JSON.stringify(state[name]);
        if (text === known[name] || (name === "text" && typeof state.text === "string")) continue; // a text of one's own is no row
        known[name] = text;
        model.set(trait, state[name]);
      }
      model.save_changes();
    };
    const hear = () => { // only what Python has set: the kernel also sends back what it was told, and that may be old by now
      const fresh = traits.filter(([name, trait]) => JSON.stringify(model.get(trait)) !== known[name]);
      for (const [name, trait] of fresh) known[name] = JSON.stringify(model.get(trait));
      if (fresh.length) page.set(Object.fromEntries(fresh.map(([name, trait]) => [name, model.get(trait)])));
    };
    const answered = ({ id, answer, error }) => {
      const asked = waiting.get(id); // none: another view of this widget has asked
      waiting.delete(id);
      error ? asked?.reject(new Error(error)) : asked?.resolve(answer);
    };
    const host = {
      read, dark: () => root.classList.contains("dark"),
      write() {
        clearTimeout(saved);
        saved = setTimeout(say, TELL_AFTER_MS);
      },
      ask: content => new Promise((resolve, reject) => {
        const id = String(Math.random());
        waiting.set(id, { resolve, reject });
        model.send({ ...content, id });
      }),
    };
    model.on("msg:custom", answered);
    let page = null;
    const forget = followTheme(el, dark => {
      root.classList.toggle("dark", dark);
      page?.paint?.();
    });
    page = begin(root, host, model);
    for (const [, trait] of traits) model.on(`change:${trait}`, hear);
    const stops = [forget, attend(root), page.close];
    return () => {
      clearTimeout(saved);
      model.off("msg:custom", answered);
      for (const [, trait] of traits) model.off(`change:${trait}`, hear);
      stops.forEach(stop => stop());
    };
  } };
}
