/* The model's page in a notebook. The model runs in the browser; where the page does not compute it, the kernel answers. */
const STATE = { change: "change", text: "row", at: "token" }; // of the page, and the widget's trait

function render({ model, el }) {
  const root = document.createElement("div"), waiting = new Map(), data = model.get("data");
  el.append(root);
  const decode = text => Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
  const dark = () => root.classList.toggle("dark", (model.get("theme") || (document.body.dataset.jpThemeLight === "false" ? "dark" : "light")) === "dark");
  let count = 0, writing = false, saved = null;
  const call = content => new Promise((resolve, reject) => {
    waiting.set(++count, { resolve, reject });
    model.send({ ...content, id: count });
  });
  const heard = ({ id, answer, error }) => {
    error ? waiting.get(id).reject(new Error(error)) : waiting.get(id).resolve(answer);
    waiting.delete(id);
  };
  const kernel = { last: null, close() {} };
  kernel.ask = (tokens, change, at) => call(kernel.last = { tokens, change, at });
  kernel.without = layer => {
    const { tokens, change, at } = kernel.last, layers = { ...change.layers, [layer]: { ...change.layers?.[layer], block: 0 } };
    return call({ tokens, change: { ...change, layers }, at }).then(answer => answer.loss);
  };
  const host = {
    read: () => Object.fromEntries(Object.entries(STATE).map(([name, trait]) => [name, model.get(trait)]).filter(([, value]) => value !== null)),
    write(state) {
      const now = { change: {}, text: 0, at: null, ...state };
      writing = true; // setting a trait tells its listeners at once: half of a state is none
      for (const [name, trait] of Object.entries(STATE)) if (typeof now[name] !== "string") model.set(trait, now[name]);
      writing = false;
      clearTimeout(saved); // a message takes time that the next move needs
      saved = setTimeout(() => model.save_changes(), 120);
    },
    weights: () => { // a copy: the bytes go to the worker
      const { buffer, byteOffset, byteLength } = model.get("weights");
      return buffer.slice(byteOffset, byteOffset + byteLength);
    },
    engine: about => (about.spec ? null : kernel),
  };
  model.on("msg:custom", heard);
  const page = live(root, { ...data, kernel: decode(data.kernel) }, host);
  const follow = () => {
    if (writing) return;
    const state = page.state(), changes = {};
    for (const [name, trait] of Object.entries(STATE))
      if (typeof state[name] !== "string" && JSON.stringify(state[name]) !== JSON.stringify(model.get(trait))) changes[name] = model.get(trait);
    if (Object.keys(changes).length) page.set(changes);
  };
  for (const trait of Object.values(STATE)) model.on(`change:${trait}`, follow);
  const themes = new MutationObserver(dark), stop = attend(root);
  themes.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light"] });
  dark();
  return () => {
    themes.disconnect();
    stop();
    model.off("msg:custom", heard);
    for (const trait of Object.values(STATE)) model.off(`change:${trait}`, follow);
    page.close();
  };
}

export default { render };
