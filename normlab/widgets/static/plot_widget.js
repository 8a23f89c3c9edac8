/* The view of normlab.widgets.plot.Plot. */
function render({ model, el }) {
  const place = document.createElement("div");
  place.style.width = "100%";
  place.style.height = `${model.get("figure").layout.height}px`; // so that nothing below moves when the plot comes
  el.append(place);
  const plot = plotter(library(model), place, ({ points: [{ data, x }] }) => model.send({ trace: data.name, x }));
  const show = () => plot.show(structuredClone(model.get("figure")));
  let stop = null;
  const observer = new ResizeObserver(() => {
    if (place.clientWidth) stop ??= attend(place.closest(".normlab") ?? el);
    plot.resize();
  });
  const forget = followTheme(el, dark => {
    model.set("dark_page", dark);
    model.save_changes();
  });
  model.on("change:figure", show);
  observer.observe(place);
  show();
  return () => {
    model.off("change:figure", show);
    observer.disconnect();
    forget();
    stop?.();
    plot.remove();
  };
}

export default { render };
