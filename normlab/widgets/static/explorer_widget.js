/* The explorer in a notebook: its state is the widget's traits, and the kernel draws a view when it is first asked for. */
const TRAITS = ["metric", "site", "mask", "way", "depth", "step", "schemes", "band", "log", "theory", "published"];

function render({ model, el }) {
  const root = document.createElement("div"), views = new Map(), waiting = new Map();
  el.append(root);
  const dark = () => (model.get("theme") || (document.body.dataset.jpThemeLight === "false" ? "dark" : "light")) === "dark";
  const traits = () => Object.fromEntries(TRAITS.map(name => [name, model.get(name)]));
  const heard = ({ view, theory, drawings }) => {
    const name = `${view} ${theory}`;
    views.set(name, drawings);
    waiting.get(name)?.resolve(drawings);
    waiting.delete(name);
  };
  const view = (key, theory) => {
    const name = `${key} ${theory}`;
    if (views.has(name)) return views.get(name);
    if (!waiting.has(name)) {
      waiting.set(name, deferred());
      model.send({ view: key, theory });
    }
    return waiting.get(name).promise;
  };
  let ahead = null, writing = false; // setting a trait tells its listeners at once: half of a state is none
  const write = state => {
    writing = true;
    for (const name of TRAITS) if (JSON.stringify(model.get(name)) !== JSON.stringify(state[name])) model.set(name, state[name]);
    writing = false;
    model.save_changes();
    clearTimeout(ahead); // what the depth slider shows next
    ahead = setTimeout(() => {
      for (const depth of model.get("choices").depths) view([state.site, state.metric, state.mask, depth, state.way].join("|"), state.theory);
    }, 400);
  };
  model.on("msg:custom", heard);
  const page = explorer(root, model.get("choices"), { Plotly: library(), dark, read: traits, write, view });
  const follow = () => {
    if (writing) return;
    const now = page.panes[0].state(), changed = Object.entries(traits()).filter(([name, value]) => JSON.stringify(value) !== JSON.stringify(now[name]));
    if (changed.length) page.set(Object.fromEntries(changed));
  };
  const paint = () => {
    root.classList.toggle("dark", dark());
    page.paint();
  };
  const themes = new MutationObserver(paint), stop = attend(root);
  themes.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light"] });
  if (page.panes) for (const name of TRAITS) model.on(`change:${name}`, follow);
  model.on("change:theme", paint);
  root.classList.toggle("dark", dark());
  return () => {
    clearTimeout(ahead);
    themes.disconnect();
    stop();
    model.off("msg:custom", heard);
    for (const name of TRAITS) model.off(`change:${name}`, follow);
    model.off("change:theme", paint);
    page.close();
  };
}
function deferred() {
  const parts = {};
  parts.promise = new Promise((resolve, reject) => Object.assign(parts, { resolve, reject }));
  return parts;
}

export default { render };
