"use strict";
(() => {
  // Figures name colours "@name"; the stylesheet defines them for each theme. Only keys of colours are replaced, never names of ops.
  const COLOURS = new Set(["color", "fgcolor", "bgcolor", "fillcolor", "gridcolor", "linecolor", "tickcolor",
    "spikecolor", "bordercolor", "paper_bgcolor", "plot_bgcolor"]);
  const figures = JSON.parse(document.getElementById("figures").textContent);

  function themed(node, style, key) {
    if (typeof node === "string") {
      return COLOURS.has(key) && node.startsWith("@") ? style.getPropertyValue("--" + node.slice(1)).trim() : node;
    }
    if (Array.isArray(node)) return node.map((child) => themed(child, style, key));
    if (node === null || typeof node !== "object") return node;
    return Object.fromEntries(Object.entries(node).map(([k, child]) => [k, themed(child, style, k)]));
  }

  // The spans that a search finds in a timeline: outlines on top of everything else.
  const found = new Map();
  function marks(div, style) {
    const hits = found.get(div);
    if (!hits || !hits.length) return [];
    const column = (i) => hits.map((hit) => hit[i]);
    return [{
      type: "bar", orientation: "h", hoverinfo: "skip", showlegend: false, base: column(1), y: column(3), width: column(4),
      x: hits.map((hit) => hit[2] - hit[1]),
      marker: { color: "rgba(0,0,0,0)", line: { color: style.getPropertyValue("--found").trim(), width: 2 } },
    }];
  }

  function search(box) {
    const div = box.querySelector(".plot"), input = box.querySelector("input"), { names, at } = figures[div.dataset.figure].spans;
    let next = 0;
    input.addEventListener("input", () => {
      const wanted = input.value.trim().toLowerCase(), hit = names.map((name) => name.toLowerCase().includes(wanted));
      const hits = wanted ? at.filter((span) => hit[span[0]]) : [];
      found.set(div, hits);
      next = 0;
      draw(div);
      const different = new Set(hits.map((span) => span[0])).size;
      box.querySelector("output").textContent = !wanted ? "" : !hits.length ? "no match"
        : `${hits.length} found, ${different} different ${different === 1 ? "name" : "names"}; press Enter for the next`;
    });
    input.addEventListener("keydown", (event) => {
      const hits = found.get(div) || [];
      if (event.key !== "Enter" || !hits.length) return;
      const [number, start, end] = hits[next % hits.length], middle = (start + end) / 2;
      const all = figures[div.dataset.figure].layout.xaxis.range;
      const half = Math.max((end - start) * 2, (all[1] - all[0]) / 60);
      box.querySelector("output").textContent = `${(next % hits.length) + 1} of ${hits.length}: ${names[number]}`;
      next += 1;
      Plotly.relayout(div, { "xaxis.range": [middle - half, middle + half] });
    });
  }

  function filter(box) {
    const rows = [...box.querySelectorAll("tbody tr")], output = box.querySelector("output");
    box.querySelector("input").addEventListener("input", (event) => {
      const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        shown += !row.hidden;
      }
      output.textContent = words.length ? `${shown} of ${rows.length}` : "";
    });
  }

  // plotly.js takes longer to start than everything else on the page, so it waits, as text, for the first figure in view.
  function start() {
    if (window.Plotly) return;
    const script = document.createElement("script");
    script.textContent = document.getElementById("plotly").textContent;
    document.head.append(script);
  }

  function draw(div) {
    start();
    near.unobserve(div);
    drawn.add(div);
    const style = getComputedStyle(document.documentElement);
    const { data, layout } = themed(figures[div.dataset.figure], style, "");
    Plotly.react(div, [...data, ...marks(div, style)], layout, {
      responsive: true, displaylogo: false, doubleClick: "reset",
      displayModeBar: /^(timelines|sweep)/.test(div.dataset.figure) ? "hover" : false,
      modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]],
    });
  }

  const drawn = new Set(), divs = [...document.querySelectorAll("[data-figure]")];
  const near = new IntersectionObserver((seen) => {
    for (const { target, isIntersecting } of seen) if (isIntersecting) draw(target);
  }, { rootMargin: "300px" });

  function sort(button) {
    const th = button.closest("th"), table = th.closest("table"), column = th.cellIndex;
    const down = th.getAttribute("aria-sort") === "ascending";
    const key = (row) => row.cells[column].dataset.sort;
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === "" || y === "") return (x === "") - (y === "");  // unknown values come last in both directions
      const difference = Number(x) - Number(y), order = Number.isNaN(difference) ? x.localeCompare(y) : difference;
      return down ? -order : order;
    });
    for (const other of th.parentElement.cells) other.removeAttribute("aria-sort");
    th.setAttribute("aria-sort", down ? "descending" : "ascending");
    table.tBodies[0].append(...rows);
  }

  for (const button of document.querySelectorAll("table.sortable th button")) {
    button.addEventListener("click", () => sort(button));
  }
  for (const button of document.querySelectorAll(".code button")) {
    button.addEventListener("click", () => {
      const code = button.parentElement.querySelector("pre");
      getSelection().selectAllChildren(code);  // a browser that lets no page copy lets its user
      navigator.clipboard?.writeText(code.textContent).then(() => { button.textContent = "Copied"; }, () => {});
    });
  }
  for (const box of document.querySelectorAll(".finder")) search(box);
  for (const box of document.querySelectorAll("[data-filter]")) filter(box);
  for (const div of divs) {
    div.style.minHeight = `${figures[div.dataset.figure].layout.height || 450}px`;  // what follows stays in its place
    near.observe(div);
  }
  addEventListener("beforeprint", () => divs.forEach(draw));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach(draw));
})();
