/* The view of normlab.widgets.plot.Plot. Arrays of numbers arrive as {columns, floats}: rows of 64-bit floats, as bytes. */
function unpacked(value) {
  if (Array.isArray(value)) return value.map(unpacked);
  if (value === null || typeof value !== "object") return value;
  if (!("floats" in value)) return Object.fromEntries(Object.entries(value).map(([key, part]) => [key, unpacked(part)]));
  const { floats, columns } = value;
  const numbers = new Float64Array(floats.buffer.slice(floats.byteOffset, floats.byteOffset + floats.byteLength));
  if (columns === null) return numbers;
  return Array.from({ length: numbers.length / columns }, (_, row) => numbers.slice(row * columns, (row + 1) * columns));
}

function render({ model, el }) {
  const place = document.createElement("div");
  place.style.width = "100%";
  place.style.height = `${model.get("figure").layout.height}px`; // so that nothing below moves when the plot comes
  el.append(place);
  const plot = plotter(library(), place, ({ points: [{ data, x }] }) => model.send({ trace: data.name, x }));
  let begun = false;
  const show = () => plot.show(unpacked(model.get("figure")));
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
  const forget = followTheme(() => {
    model.set("dark_page", inDarkLab());
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
