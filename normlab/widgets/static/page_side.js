/* What a page does for every widget of normlab: keys on its controls are the reader's, controls and plots have names for who
   does not see them, and the kernel is told whether the page is dark. */
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

/* Keep the model's `dark_page` as JupyterLab's theme is; returns how to stop. */
function followTheme(model) {
  const tell = () => {
    model.set("dark_page", document.body.dataset.jpThemeLight === "false");
    model.save_changes();
  };
  const themes = new MutationObserver(tell);
  themes.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light"] });
  tell();
  return () => themes.disconnect();
}
