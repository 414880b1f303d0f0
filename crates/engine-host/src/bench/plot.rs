//! Line charts with logarithmic axes, as SVG.

use std::fmt::Write;

/// A line of a chart.
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// (x, y), both above 0.
    pub points: Vec<(f64, f64)>,
    /// Whether it is what the chart is about, and not something to compare with.
    pub own: bool,
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 210.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 48.0;
const COLOURS: [&str; 8] =
    ["#0b6e4f", "#c8553d", "#3d5a80", "#8d6a9f", "#b08900", "#5f6b6d", "#a83279", "#2a9d8f"];

/// A chart of these lines.
pub fn chart(title: &str, x_name: &str, y_name: &str, lines: &[Series]) -> String {
    let all = || lines.iter().flat_map(|s| s.points.iter());
    let x = Axis::over(all().map(|p| p.0), LEFT, WIDTH - RIGHT);
    let y = Axis::over(all().map(|p| p.1), HEIGHT - BOTTOM, TOP).into_decades();
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
         <text x=\"{LEFT}\" y=\"22\" font-size=\"15\">{}</text>\n",
        escape(title)
    );
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    for value in y.decades() {
        let at = y.place(value);
        let _ = writeln!(
            svg,
            "<path d=\"M{LEFT} {at:.1}H{right}\" stroke=\"#dddddd\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 6.0,
            at + 4.0,
            short(value)
        );
    }
    let mut ticks: Vec<f64> = all().map(|p| p.0).collect();
    ticks.sort_by(f64::total_cmp);
    ticks.dedup();
    let mut last = f64::MIN;
    for value in ticks {
        let at = x.place(value);
        // Names that would lie on each other are left out.
        let name = if at - last > 28.0 { short(value) } else { String::new() };
        last = if name.is_empty() { last } else { at };
        let _ = writeln!(
            svg,
            "<path d=\"M{at:.1} {bottom}v5\" stroke=\"#555555\"/>\
             <text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{name}</text>",
            bottom + 18.0
        );
    }
    let _ = writeln!(
        svg,
        "<path d=\"M{LEFT} {TOP}V{bottom}H{right}\" fill=\"none\" stroke=\"#555555\"/>\n\
         <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\n\
         <text transform=\"translate(16 {:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
        (LEFT + right) / 2.0,
        HEIGHT - 10.0,
        escape(x_name),
        (TOP + bottom) / 2.0,
        escape(y_name)
    );
    for (i, line) in lines.iter().enumerate() {
        let colour = COLOURS[i % COLOURS.len()];
        let width = if line.own { 2.5 } else { 1.5 };
        let dash = if line.own { "" } else { " stroke-dasharray=\"5 3\"" };
        let points: Vec<String> = line
            .points
            .iter()
            .map(|&(px, py)| format!("{:.1},{:.1}", x.place(px), y.place(py)))
            .collect();
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\"{dash}/>",
            points.join(" ")
        );
        for point in &points {
            let (px, py) = point.split_once(',').unwrap_or_default();
            let _ = writeln!(svg, "<circle cx=\"{px}\" cy=\"{py}\" r=\"2.5\" fill=\"{colour}\"/>");
        }
        let at = TOP + 16.0 * i as f64 + 6.0;
        let _ = writeln!(
            svg,
            "<path d=\"M{:.1} {at:.1}h18\" stroke=\"{colour}\" stroke-width=\"{width}\"{dash}/>\
             <text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            right + 12.0,
            right + 36.0,
            at + 4.0,
            escape(&line.name)
        );
    }
    svg.push_str("</svg>\n");
    svg
}

/// A logarithmic axis from `low` to `high`, drawn between two places.
struct Axis {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    fn over(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Self {
        let (low, high) = values
            .filter(|v| *v > 0.0)
            .fold((f64::MAX, f64::MIN_POSITIVE), |(low, high), v| (low.min(v), high.max(v)));
        Self { low: low.min(high), high, from, to }
    }

    fn into_decades(self) -> Self {
        let low = 10f64.powf(self.low.log10().floor());
        Self { low, high: 10f64.powf(self.high.log10().ceil()).max(low * 10.0), ..self }
    }

    fn decades(&self) -> Vec<f64> {
        let (low, high) = (self.low.log10().round() as i32, self.high.log10().round() as i32);
        (low..=high).map(|e| 10f64.powi(e)).collect()
    }

    fn place(&self, value: f64) -> f64 {
        let range = (self.high / self.low).log10();
        let share =
            if range > 0.0 { (value.max(self.low) / self.low).log10() / range } else { 0.5 };
        self.from + (self.to - self.from) * share
    }
}

/// `4096` as `4k`, `0.1` as it is.
fn short(value: f64) -> String {
    const K: f64 = 1024.0;
    match value {
        v if v >= K * K && v % (K * K) == 0.0 => format!("{}M", v / K / K),
        v if v >= K && v % K == 0.0 => format!("{}k", v / K),
        v => format!("{v}"),
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_lie_between_the_axes_and_larger_ones_higher() {
        let y = Axis::over([3.0, 450.0].into_iter(), 400.0, 40.0).into_decades();
        assert_eq!(y.decades(), [1.0, 10.0, 100.0, 1000.0]);
        assert!((y.place(1.0) - 400.0).abs() < 1e-9 && (y.place(1000.0) - 40.0).abs() < 1e-9);
        assert!((y.place(10.0) - 280.0).abs() < 1e-9);
    }

    #[test]
    fn a_chart_shows_every_point_and_name() {
        let points = vec![(1.0, 0.5), (256.0, 20.0), (4096.0, 21.0)];
        let own = Series { name: "a < b".into(), points, own: true };
        let svg = chart("t", "x", "y", &[own]);
        assert_eq!(svg.matches("<circle").count(), 3);
        assert!(svg.contains("a &lt; b") && svg.contains(">4k<") && svg.ends_with("</svg>\n"));
    }
}
