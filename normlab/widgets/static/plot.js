/* Draws plotly figures into one element (`Plotly`: the library, or a promise of it): no two at a time, the latest wins, and lines on fixed axes that differ from those before
   in nothing but their numbers and the title are not laid out anew. Used by the widget and by the page without a kernel. */
function plotter(Plotly, element, clicked = () => {}) {
  const NUMBERS = new Set(["x", "y", "customdata"]);
  const CONFIG = { displaylogo: false, showSendToCloud: false };
  const STILL = { mode: "immediate", transition: { duration: 0 }, frame: { duration: 0, redraw: false } };
  let wanted = null, last = null, frame = null, drawing = false, listening = false, width = 0;

  const outline = ({ data, layout }) => JSON.stringify([
    data.map(trace => Object.fromEntries(Object.entries(trace).filter(([key]) => !NUMBERS.has(key)))),
    { ...layout, title: { ...layout.title, text: null } },
  ]);

  const isLine = ({ type = "scatter" }) => type === "scatter";
  const isFixed = ([key, { range }]) => !/^[xy]axis/.test(key) || Boolean(range);
  const keepsItsLayout = ({ data, layout }) => data.every(isLine) && Object.entries(layout).every(isFixed);

  async function draw(figure) {
    const { react, relayout, animate, Plots } = await Plotly;
    const now = keepsItsLayout(figure) ? outline(figure) : {}; // which equals nothing
    if (now !== frame || width !== element.clientWidth) {
      frame = null;
      await react(element, figure.data, figure.layout, CONFIG);
      if (listening && width !== element.clientWidth) await Plots.resize(element); // plotly keeps its first width
      if (!listening) element.on("plotly_click", clicked);
      listening = true;
      frame = now;
      width = element.clientWidth;
      return;
    }
    const title = figure.layout.title?.text;
    if (title !== element.layout.title?.text) relayout(element, { "title.text": title });
    const numbers = figure.data.map(trace => Object.fromEntries(Object.entries(trace).filter(([key]) => NUMBERS.has(key))));
    await animate(element, { data: numbers, traces: numbers.map((_, place) => place) }, STILL);
  }

  async function work() {
    drawing = true;
    try {
      while (wanted) {
        const figure = wanted;
        wanted = null;
        await draw(figure);
      }
    } finally {
      drawing = false;
    }
  }

  return {
    show(figure) {
      wanted = last = figure;
      if (!drawing && element.clientWidth) work();
    },
    /* The element may have another width: drawn anew, and for the first time once it has any. */
    resize() {
      if (last && (element.clientWidth !== width || wanted)) this.show(last); // wanted: set while hidden
    },
    remove() {
      wanted = last = null;
      Promise.resolve(Plotly).then(({ purge }) => purge(element));
    },
  };
}
