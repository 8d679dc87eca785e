// Filters of the claims, boxes that scroll, and charts. Every page reads well without it.
"use strict";

function filterClaims() {
  const form = document.getElementById("filters");
  if (!form) return;
  const rows = [...document.querySelectorAll("#table tbody tr")];
  const selects = [...form.querySelectorAll("select")];
  const fits = (row, but) => selects.every((s) => s === but || !s.value || row.dataset[s.name] === s.value);

  function show() {
    rows.forEach((row) => { row.hidden = !fits(row); });
    document.getElementById("shown").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} claims`;
    for (const select of selects) {
      const left = rows.filter((row) => fits(row, select));
      for (const option of select.options) {
        const n = option.value ? left.filter((row) => row.dataset[select.name] === option.value).length : left.length;
        option.textContent = `${option.dataset.words} (${n})`;
      }
    }
  }

  function keep() {
    const state = new URLSearchParams(selects.filter((s) => s.value).map((s) => [s.name, s.value])).toString();
    history.replaceState(null, "", state ? `#${state}` : location.pathname + location.search);
    show();
  }

  function read() {
    const hash = location.hash.slice(1);
    const state = new URLSearchParams(hash.includes("=") ? hash : "");
    selects.forEach((s) => { s.value = state.get(s.name) || ""; if (s.selectedIndex < 0) s.value = ""; });
    show();
  }

  form.hidden = false;
  form.addEventListener("change", keep);
  form.addEventListener("reset", () => setTimeout(keep));
  window.addEventListener("hashchange", read);
  read();
}

// a box that scrolls can be reached by keyboard, one that does not is no stop on the way
function reachBoxes() {
  for (const box of document.querySelectorAll(".scroll, .chart")) {
    const scrolls = box.scrollWidth > box.clientWidth + 1 && box.clientWidth > 0;
    if (scrolls) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
    if (box.dataset.label) {
      if (scrolls) { box.setAttribute("role", "group"); box.setAttribute("aria-label", box.dataset.label); }
      else { box.removeAttribute("role"); box.removeAttribute("aria-label"); }
    }
  }
}

// as many panels in a row as fit, and as wide as they then may be
function fit(spec, width) {
  const { beside } = spec.usermeta || {};
  if (!beside) return spec;
  spec.columns = Math.max(1, Math.min(spec.columns, spec.concat.length, Math.floor(width / (200 + beside))));
  const each = Math.max(140, Math.min(320, Math.floor(width / spec.columns) - beside));
  spec.concat.forEach((panel) => panel.vconcat.forEach((part) => { part.width = each; }));
  return spec;
}

// the slider holds an exponent and says the loop count
function sayCount(place, view) {
  const slider = place.querySelector('input[name="place"]');
  if (!slider) return;
  const said = document.createElement("output");
  const say = (exponent) => {
    said.textContent = 2 ** exponent;
    slider.setAttribute("aria-valuetext", `K = ${2 ** exponent}`);
  };
  slider.parentElement.querySelectorAll("span:not(.vega-bind-name)").forEach((number) => { number.hidden = true; });
  slider.after(said);
  say(view.signal("place"));
  view.addSignalListener("place", (_, exponent) => say(exponent));
}

async function draw(box) {
  const spec = fit(JSON.parse(box.querySelector("script").textContent), box.clientWidth);
  const place = document.createElement("div");
  box.append(place);
  try {
    const { view } = await vegaEmbed(place, spec, { actions: false, renderer: "svg", tooltip: { theme: "light" } });
    const svg = place.querySelector("svg"), picture = document.createElement("div");
    picture.setAttribute("role", "img");
    picture.setAttribute("aria-label", box.getAttribute("aria-label"));
    svg.setAttribute("aria-hidden", "true");
    svg.replaceWith(picture);
    picture.append(svg);
    const bindings = place.querySelector(".vega-bindings");
    if (bindings) place.prepend(bindings);
    sayCount(place, view);
    for (const [name, colour] of Object.entries((spec.usermeta || {}).colours || {})) {
      const input = place.querySelector(`input[name="${name}"]`);
      input.style.accentColor = colour;
      const label = input.closest(".vega-bind");
      label.classList.add("of-arm");
      label.style.borderColor = colour;
    }
    box.querySelector(".fallback").hidden = true;
    box.dataset.drawn = "yes";
    box.view = view;
  } catch (error) {
    place.remove();
    box.dataset.drawn = "no";
    console.error(error);
  }
}

document.addEventListener("DOMContentLoaded", async () => {
  filterClaims();
  reachBoxes();
  const charts = [...document.querySelectorAll(".chart")];
  if (charts.length && window.vegaEmbed) for (const box of charts) await draw(box);
  reachBoxes();
});
document.addEventListener("toggle", reachBoxes, true);
window.addEventListener("resize", reachBoxes);
window.addEventListener("load", reachBoxes);
