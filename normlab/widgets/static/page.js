/* What both pages share: compressed data, light and dark, and the state in the address. */
const unzip = text => {
  const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")));
};
const readAddress = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
let saved = null, written = readAddress(), chosen = written.dark;

/* Once the reader rests: writing the address takes as long as drawing. */
function writeAddress(values = written) {
  written = values;
  clearTimeout(saved);
  const text = new URLSearchParams({ ...values, ...(chosen === undefined ? {} : { dark: chosen }) }).toString();
  saved = setTimeout(() => history.replaceState(null, "", "#" + text.replaceAll("%3A", ":").replaceAll("%2C", ",")), 250);
}

/* Dark as the address says, else as the system is, until the reader chooses; `act` is told at each change. */
function followDark(act) {
  const box = document.getElementById("dark"), system = matchMedia("(prefers-color-scheme: dark)");
  const paint = dark => {
    box.checked = dark;
    document.body.classList.toggle("dark", dark);
    act();
  };
  box.addEventListener("change", () => {
    chosen = box.checked ? "1" : "0";
    paint(box.checked);
    writeAddress();
  });
  system.addEventListener("change", () => chosen === undefined && paint(system.matches));
  paint(chosen ? chosen === "1" : system.matches);
}
const isDark = () => document.body.classList.contains("dark");
const root = document.querySelector("main"), read = unzip(document.getElementById("data").textContent).json();
/* In a frame: tell the page around it how tall this one is. */
if (parent !== window) new ResizeObserver(() => parent.postMessage({ height: document.documentElement.offsetHeight }, "*")).observe(document.documentElement);
