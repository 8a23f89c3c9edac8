/* The explorer in a notebook: the kernel draws a view when it is first asked for. */
const TRAITS = ["metric", "site", "mask", "way", "depth", "step", "rate", "schemes", "band", "log", "theory", "published"];
const AHEAD_MS = 400;

export default widgetOf(Object.fromEntries(TRAITS.map(name => [name, name])), (root, host, model) => {
  const views = new Map(), data = model.get("choices");
  let ahead = null;
  const view = (key, theory) => {
    const name = `${key} ${theory}`;
    if (!views.has(name)) views.set(name, host.ask({ view: key, theory }).then(drawings => {
      views.set(name, drawings);
      return drawings;
    }, error => {
      views.delete(name); // to be asked for again
      throw error;
    }));
    return views.get(name);
  };
  const write = state => {
    host.write();
    clearTimeout(ahead); // what the sliders of depth and rate show next
    ahead = setTimeout(() => {
      for (const depth of data.depths) view(viewKey(data, { ...state, depth }), state.theory);
      for (const [, rate] of data.rates[state.depth]) view(viewKey(data, { ...state, rate }), state.theory);
    }, AHEAD_MS);
  };
  const page = explorer(root, data, { ...host, Plotly: library(model), write, view });
  return { ...page, close() {
    clearTimeout(ahead);
    page.close();
  } };
});
