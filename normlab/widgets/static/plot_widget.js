/* The view of normlab.widgets.plot.Plot. */
function render({ model, el }) {
  const place = document.createElement("div");
  place.style.width = "100%";
  place.style.height = `${model.get("figure").layout.height}px`; // so that nothing below moves when the plot comes
  el.append(place);
  const plot = plotter(library(), place, ({ points: [{ data, x }] }) => model.send({ trace: data.name, x }));
  let begun = false;
  const show = () => plot.show(structuredClone(model.get("figure")));
  const update = () => { if (begun) show(); };
  let stop = () => {};
  const observer = new ResizeObserver(() => {
    if (begun) plot.resize();
    else if (place.clientWidth) {
      begun = true;
      const root = place.closest(".normlab");
      if (root) stop = attend(root);
      show();
    }
  });
  const forget = followTheme(el, dark => {
    model.set("dark_page", dark);
    model.save_changes();
  });
  model.on("change:figure", update);
  observer.observe(place);
  return () => {
    model.off("change:figure", update);
    observer.disconnect();
    forget();
    stop();
    plot.remove();
  };
}

export default { render };
