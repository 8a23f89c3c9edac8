/* The view of normlab.widgets.live.PageSide, which is not seen: it looks after the widget of normlab that it is part of. */
function render({ model, el }) {
  let stop = () => {}, frame = null;
  const begin = () => {
    const root = el.closest(".normlab");
    if (root) stop = attend(root);
    else frame = requestAnimationFrame(begin); // not in the page yet
  };
  begin();
  const forget = followTheme(model);
  return () => {
    cancelAnimationFrame(frame);
    forget();
    stop();
  };
}

export default { render };
