const dark = matchMedia('(prefers-color-scheme: dark)'), printed = matchMedia('print');
function draw() {
  const style = getComputedStyle(document.documentElement);
  const colour = name => style.getPropertyValue(name).trim();
  const narrow = window.innerWidth < 640, line = colour('--line');
  const axis = {automargin: true, gridcolor: line, zerolinecolor: line, linecolor: line};
  plots.forEach((plot, number) => {
    const layout = Object.assign({}, plot.layout, {
      paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)',
      colorway: colour('--series').split(',').map(text => text.trim()),
      font: {color: colour('--ink'), size: narrow ? 10 : 12},
      margin: {l: narrow ? 48 : 64, r: 12, t: 8, b: 48}, showlegend: plot.traces.length > 1,
      legend: {orientation: 'h', yref: 'container', yanchor: 'bottom', y: 0},
      xaxis: Object.assign({}, axis, plot.layout.xaxis),
      yaxis: Object.assign({}, axis, plot.layout.yaxis),
    });
    Plotly.react('plot' + number, plot.traces, layout, {responsive: true, displayModeBar: false});
  });
}
// The palette follows the screen, and is the light one on paper.
dark.addEventListener('change', draw);
printed.addEventListener('change', draw);
draw();
