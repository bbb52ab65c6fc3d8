// <hw-chart data-chart='{"unit", "times", "lines"}'>: drawn by uPlot inside a shadow root, which
// pages that renew themselves do not touch; only the attribute changes, and the lines follow.
const COLOURS = ["--line-1", "--line-2", "--line-3"];

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const short = (value) =>
  value == null ? "—" : value >= 1000 ? `${+(value / 1000).toPrecision(3)}k` : `${+value.toPrecision(3)}`;

const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false });
const day = (at) => new Date(at * 1000).toLocaleDateString([], { month: "short", day: "numeric" });
const DAY_S = 86_400;
// So few values that a line between them would not show them.
const FEW = 8;

class Chart extends HTMLElement {
  static observedAttributes = ["data-chart"];

  connectedCallback() {
    const root = this.shadowRoot ?? this.attachShadow({ mode: "open" });
    const sheet = Object.assign(document.createElement("link"), { rel: "stylesheet", href: "/console/static/vendor/uplot.min.css" });
    const own = Object.assign(document.createElement("link"), { rel: "stylesheet", href: "/console/static/chart.css" });
    this.place = document.createElement("div");
    root.replaceChildren(sheet, own, this.place);
    this.observer = new ResizeObserver(() => this.plot?.setSize(this.size()));
    this.observer.observe(this);
    this.redraw = () => this.draw();
    document.addEventListener("theme", this.redraw);
    this.draw();
  }

  disconnectedCallback() {
    this.observer?.disconnect();
    document.removeEventListener("theme", this.redraw);
    this.plot?.destroy();
    this.plot = null;
  }

  attributeChangedCallback() {
    if (!this.plot) return;
    const { times, lines } = JSON.parse(this.dataset.chart);
    if (Object.keys(lines).join() !== this.names) return this.draw();
    this.plot.setData([times, ...Object.values(lines)]);
  }

  size() {
    return { width: Math.max(160, this.clientWidth), height: Number(this.dataset.height) };
  }

  draw() {
    if (!this.place || !window.uPlot) return;
    this.plot?.destroy();
    const { times, lines } = JSON.parse(this.dataset.chart);
    this.names = Object.keys(lines).join();
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const named = times.length > 1 && times[1] - times[0] >= DAY_S ? day : clock;
    const series = Object.entries(lines).map(([label, values], index) => ({
      label, stroke: colour(COLOURS[index % COLOURS.length]), width: 1.6, spanGaps: false,
      points: { show: values.filter((value) => value != null).length < FEW, size: 5 },
      value: (_, value) => short(value),
    }));
    this.plot = new uPlot(
      {
        ...this.size(),
        cursor: { y: false, points: { size: 6 } },
        legend: { live: true },
        scales: { y: { range: (_, __, most) => [0, most > 0 ? most * 1.1 : 1] } },
        axes: [{ ...axis, size: 24, space: 64, values: (_, times) => times.map(named) }, { ...axis, size: 46, values: (_, values) => values.map(short) }],
        series: [{ label: "At", value: (_, at) => (at ? named(at) : "—") }, ...series],
      },
      [times, ...Object.values(lines)],
      this.place,
    );
  }
}

export function drawCharts() {
  if (!customElements.get("hw-chart")) customElements.define("hw-chart", Chart);
}
