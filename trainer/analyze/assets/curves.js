// Curves of runs over their steps, drawn from `data.runs`; numbers are those of metrics.jsonl.
const WIDTH = 440, HEIGHT = 210, LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 26;

function draw(tag, attributes, ...children) {
  const made = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const by = power * [1, 2, 5, 10].find(factor => factor * power >= rough), made = [];
  for (let i = Math.ceil(low / by - 1e-9); i * by <= high + by * 1e-9; i++) made.push(Number((i * by).toPrecision(6)));
  return made;
}
function frame(title, steps, low, high, read) {
  if (!(high > low)) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const ends = steps.length > 1 ? [steps[0], steps[steps.length - 1]] : [steps[0] - 1, steps[0] + 1];
  const x = step => LEFT + (WIDTH - LEFT - RIGHT) * (step - ends[0]) / (ends[1] - ends[0]);
  const y = value => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low);
  const svg = draw('svg', { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, tabindex: '0', role: 'img', 'aria-label': title });
  for (const value of ticks(low, high, 4))
    svg.append(draw('path', { class: 'grid', d: `M${LEFT} ${y(value)}H${WIDTH - RIGHT}` }),
      draw('text', { x: LEFT - 6, y: y(value) + 4, 'text-anchor': 'end' }, String(value)));
  for (const step of ticks(...ends, 6).filter(Number.isInteger))
    svg.append(draw('text', { x: x(step), y: HEIGHT - 8, 'text-anchor': 'middle' }, String(step)));
  const cursor = draw('path', { class: 'cursor', d: '' });
  let at = -1;
  const point = index => {
    at = Math.max(0, Math.min(steps.length - 1, index));
    cursor.setAttribute('d', `M${x(steps[at])} ${TOP}V${HEIGHT - BOTTOM}`);
    reading.textContent = `${title}, step ${steps[at]}: ${read(steps[at])}`;
  };
  svg.addEventListener('mousemove', event => {
    const box = svg.getBoundingClientRect(), place = (event.clientX - box.left) * WIDTH / box.width;
    const distance = steps.map(step => Math.abs(x(step) - place));
    point(distance.indexOf(Math.min(...distance)));
  });
  svg.addEventListener('mouseleave', () => cursor.setAttribute('d', ''));
  svg.addEventListener('focus', () => { if (svg.matches(':focus-visible')) point(at < 0 ? steps.length - 1 : at); });
  svg.addEventListener('keydown', event => {
    const by = { ArrowRight: 1, ArrowLeft: -1, Home: -1e9, End: 1e9 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    point(at + by);
  });
  const made = make('figure', { class: 'curve' }, make('figcaption', {}, make('strong', {}, title)), svg);
  return { made, svg, x, y, finish: () => { svg.append(cursor); return made; } };
}
function pointsOf(run, metric) {
  const values = run.metrics[metric] || [];
  return run.steps.map((step, i) => [step, values[i] ?? null]).filter(([, value]) => value !== null);
}
function line(points, x, y) { return points.map(([step, value], i) => `${i ? 'L' : 'M'}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join(''); }
function trailing(points) {
  const span = Math.max(1, Math.floor(points.length / 10));
  return points.map(([step], i) => {
    const inside = points.slice(Math.max(0, i - span + 1), i + 1);
    return [step, inside.reduce((sum, [, value]) => sum + value, 0) / inside.length];
  });
}
function meanOf(lines) {
  const at = new Map();
  for (const points of lines) for (const [step, value] of points) at.set(step, [...(at.get(step) || []), value]);
  return [...at].filter(([, values]) => values.length === lines.length).sort((a, b) => a[0] - b[0])
    .map(([step, values]) => [step, values.reduce((sum, value) => sum + value, 0) / values.length]);
}
function extent(values) { return values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]); }
function curve({ title, metric, error }) {
  const lines = data.runs.map(run => pointsOf(run, metric)), all = lines.flat();
  if (!all.length) return null;
  const steps = [...new Set(all.map(([step]) => step))].sort((a, b) => a - b), shown = all.map(([, value]) => value);
  const errors = data.runs.map(run => new Map(error ? pointsOf(run, error) : []));
  lines.forEach((points, k) => points.forEach(([step, value]) => {
    const by = errors[k].get(step) || 0;
    shown.push(value - by, value + by);
  }));
  const read = step => data.runs.flatMap((run, k) => lines[k].filter(point => point[0] === step).map(([, value]) => {
    const by = errors[k].get(step);
    return (data.runs.length > 1 ? run.name + ' ' : '') + String(value) + (by ? ` \u00b1 ${digits(by, 2)}` : '');
  })).join(' \u00b7 ');
  const { svg, x, y, finish } = frame(title, steps, ...extent(shown), read);
  for (const group of new Set(data.runs.map(run => run.group))) {
    const members = data.runs.map((run, k) => k).filter(k => data.runs[k].group === group);
    for (const k of members) {
      svg.append(draw('path', { class: `line faint r${group % 8}`, d: line(lines[k], x, y) }));
      if (error) for (const [step, value] of lines[k]) {
        const by = errors[k].get(step) || 0;
        svg.append(draw('path', { class: `line r${group % 8}`, d: `M${x(step)} ${y(value - by)}V${y(value + by)}` }),
          draw('circle', { class: `dot r${group % 8}`, cx: x(step), cy: y(value), r: 3 }));
      }
    }
    const mean = meanOf(members.map(k => lines[k]));
    svg.append(draw('path', { class: `line r${group % 8}`, d: line(error ? mean : trailing(mean), x, y) }));
  }
  return finish();
}
function stages(run) {
  const names = Object.keys(run.metrics).filter(name => name.startsWith('time/')).map(name => name.slice(5));
  const rows = pointsOf(run, 'step_time').map(([step]) => {
    const i = run.steps.indexOf(step);
    return [step, names.map(name => run.metrics['time/' + name][i] ?? 0)];
  });
  if (!rows.length || !names.length) return null;
  const places = new Map(rows), top = Math.max(...rows.map(([, parts]) => parts.reduce((a, b) => a + b, 0)));
  const title = 'Seconds per step' + (data.runs.length > 1 ? `, ${run.name}` : '');
  const read = step => names.map((name, i) => `${name} ${String(places.get(step)[i])}`).join(' \u00b7 ');
  const { made, svg, x, y, finish } = frame(title, rows.map(([step]) => step), 0, top, read);
  const wide = rows.length > 1 ? (WIDTH - LEFT - RIGHT) / (rows.length - 1) : 40;
  names.forEach((name, i) => {
    const bars = rows.map(([step, parts]) => {
      const below = parts.slice(0, i).reduce((a, b) => a + b, 0), from = Math.max(LEFT, x(step) - wide / 2);
      const to = Math.min(WIDTH - RIGHT, x(step) + wide / 2);
      return `M${from.toFixed(1)} ${y(below).toFixed(1)}H${to.toFixed(1)}V${y(below + parts[i]).toFixed(1)}H${from.toFixed(1)}Z`;
    });
    svg.append(draw('path', { class: `band s${i % 8}`, d: bars.join('') }));
    made.firstChild.append(make('span', { class: 'scale' }, make('i', { class: `s${i % 8}` }), name));
  });
  return finish();
}
function fill(place, drawn) { place.append(...drawn.filter(Boolean)); }
fill(document.getElementById('curves'), [...data.panels.map(curve), ...data.runs.map(stages)]);
const more = document.getElementById('more'), known = new Set([...data.panels.map(panel => panel.metric), ...data.hidden]);
more.addEventListener('toggle', () => {
  const names = [...new Set(data.runs.flatMap(run => Object.keys(run.metrics)))].filter(name => !known.has(name)).sort();
  fill(more.querySelector('.row'), names.map(name => curve({ title: name, metric: name })));
}, { once: true });
