// The page map.md: sliders, and a table of methods. MAP is the table of scripts/make_map.py.
const SLIDERS = [
  {axis: "rate_mbit", name: "rate of each link", unit: "Mbit/s", start: 50, low: 10, high: 10000},
  {axis: "rtt_ms", name: "round trip", unit: "ms", start: 80, low: 0.2, high: 300},
  {axis: "parameters", name: "parameters", unit: "", start: 1e7, low: 1e5, high: 1e9},
  {axis: "ranks", name: "ranks", unit: "", start: 4, low: 2, high: 32},
  {axis: "step_ms", name: "computation of a step", unit: "ms", start: 200, low: 5, high: 5000},
];
const METHODS = [
  {name: "DDP", exchange: "ddp", every: 1},
  {name: "attach, dense", exchange: "none", every: 1},
  {name: "attach, 4 bits", exchange: "uniform", every: 1},
  {name: "attach, top 1 %", exchange: "topk", every: 1},
  ...[5, 10, 20, 50, 100, 500].map(every => ({name: `local steps, every=${every}`, exchange: "uniform", every})),
];

// The seconds of an exchange between the points of the grid, as `between` of make_map.py.
function between(exchange, point) {
  let around = [[0, 1]];
  Object.entries(MAP.axes).forEach(([name, axis]) => {
    const value = point[name];
    const above = axis.findIndex(mark => mark >= value);
    const at = Math.max(1, above < 0 ? axis.length - 1 : above);
    const low = Math.log(axis[at - 1]);
    const share = (Math.log(value) - low) / (Math.log(axis[at]) - low);
    around = around.flatMap(([place, weight]) => [
      [place * axis.length + at - 1, weight * (1 - share)],
      [place * axis.length + at, weight * share],
    ]);
  });
  const logs = around.map(([place, weight]) => weight * Math.log(MAP.seconds[exchange][place]));
  return Math.exp(logs.reduce((sum, part) => sum + part, 0));
}

function shortened(value) {
  if (value >= 1e9) return `${+(value / 1e9).toPrecision(2)} B`;
  if (value >= 1e6) return `${+(value / 1e6).toPrecision(2)} M`;
  if (value >= 1e5) return `${+(value / 1e3).toPrecision(2)} k`;
  return `${+value.toPrecision(2)}`;
}

function figures(point) {
  const computeS = point.step_ms / 1000;
  return METHODS.map(method => {
    const stepS = computeS + between(method.exchange, point) / method.every;
    return {...method, stepS, useful: computeS / stepS};
  });
}

function readPoint() {
  return Object.fromEntries(SLIDERS.map(slider => {
    const raw = Math.exp(Number(document.getElementById(slider.axis).value));
    return [slider.axis, slider.axis === "ranks" ? Math.round(raw) : raw];
  }));
}

function update() {
  const point = readPoint();
  for (const slider of SLIDERS)
    document.getElementById(`${slider.axis}-value`).textContent = `${shortened(point[slider.axis])} ${slider.unit}`;
  const rows = figures(point);
  const chosen = rows.find(row => row.name !== "attach, top 1 %" && row.useful >= 0.9) || rows[rows.length - 1];
  const ddp = rows[0].stepS;
  const part = chosen === rows[0] ? "" : ` A step takes ${(ddp / chosen.stepS).toFixed(1)} times less than under DDP.`;
  document.getElementById("advice").innerHTML =
    `<strong>Begin with ${chosen.name}.</strong>${part} ${Math.round(100 * chosen.useful)} % of the time is computation.`;
  const table = document.getElementById("methods");
  table.innerHTML = "<tr><th>method</th><th>seconds per step</th><th>useful time</th></tr>";
  for (const row of rows) {
    const line = table.insertRow();
    if (row === chosen) line.style.fontWeight = "bold";
    for (const text of [row.name, row.stepS.toPrecision(3), `${Math.round(100 * row.useful)} %`])
      line.insertCell().textContent = text;
  }
}

for (const slider of SLIDERS) {
  const label = document.createElement("label");
  label.innerHTML = `${slider.name}: <strong id="${slider.axis}-value"></strong><br>
    <input type="range" id="${slider.axis}" min="${Math.log(slider.low)}" max="${Math.log(slider.high)}"
     step="any" value="${Math.log(slider.start)}" style="width: min(100%, 24rem)"><br>`;
  document.getElementById("sliders").append(label);
}
document.getElementById("sliders").addEventListener("input", update);
update();
