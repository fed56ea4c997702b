/**
 * Grafana's Prometheus data source, as far as boards use it: range and instant queries, both result formats, legends,
 * intervals, `label_values`. The frames have the names, types and order of columns of Grafana's own.
 */
import {
  type DataFrame,
  type DataQuery,
  type DataQueryRequest,
  type DataQueryResponse,
  DataSourceApi,
  type DataSourceInstanceSettings,
  type DataSourceJsonData,
  type Field,
  FieldType,
  type LegacyMetricFindQueryOptions,
  type MetricFindValue,
  type ScopedVars,
  type TimeRange,
  createDataFrame,
  rangeUtil,
} from '@grafana/data';
import { getTemplateSrv } from '@grafana/runtime';

export interface PrometheusQuery extends DataQuery {
  expr: string;
  instant?: boolean;
  range?: boolean;
  format?: 'time_series' | 'table' | 'heatmap';
  legendFormat?: string;
  interval?: string;
}

export interface Options extends DataSourceJsonData {
  timeInterval?: string;
}

type Labels = Record<string, string>;
type Sample = [number, string];

interface Result {
  metric: Labels;
  value?: Sample;
  values?: Sample[];
}

/** The step of a query, in seconds, and the variables that hang on it. */
interface Step {
  seconds: number;
  scopedVars: ScopedVars;
}

const SAFE_POINTS = 11_000;

export class PrometheusDatasource extends DataSourceApi<PrometheusQuery, Options> {
  readonly scrapeInterval: string;

  constructor(settings: DataSourceInstanceSettings<Options>) {
    super(settings);
    this.scrapeInterval = settings.jsonData.timeInterval ?? '15s';
    this.interval = this.scrapeInterval;
  }

  async query(request: DataQueryRequest<PrometheusQuery>): Promise<DataQueryResponse> {
    const targets = request.targets.filter((target) => target.expr && !target.hide);
    const found = await Promise.all(targets.map((target) => this.run(target, request)));
    const tables = found.filter((frames, index) => targets[index]?.format === 'table' && frames.some((f) => f.length));
    const data = found.flatMap((frames, index) => {
      const target = targets[index];
      return target?.format === 'table' ? toTable(frames, target.refId, tables.length) : frames;
    });
    return { data, key: request.requestId };
  }

  private async run(target: PrometheusQuery, request: DataQueryRequest<PrometheusQuery>): Promise<DataFrame[]> {
    const step = this.step(target, request);
    const expr = interpolate(target.expr, step.scopedVars);
    const { from, to } = request.range;
    const frames: DataFrame[] = [];
    // Grafana runs a query of neither kind as a range query.
    if (target.instant) {
      const answer = await this.get('query', { query: expr, time: String(to.valueOf() / 1000) });
      frames.push(...toFrames(answer as never, target, expr));
    }
    if (target.range || !target.instant) {
      const answer = await this.get('query_range', {
        query: expr,
        start: String(align(from.valueOf() / 1000, step.seconds)),
        end: String(align(to.valueOf() / 1000, step.seconds)),
        step: String(step.seconds),
      });
      frames.push(...toFrames(answer as never, target, expr, step.seconds));
    }
    return frames;
  }

  private step(target: PrometheusQuery, request: DataQueryRequest<PrometheusQuery>): Step {
    const scrape = rangeUtil.intervalToSeconds(this.scrapeInterval);
    const least = target.interval
      ? rangeUtil.intervalToSeconds(interpolate(target.interval, request.scopedVars))
      : scrape;
    const range = (request.range.to.valueOf() - request.range.from.valueOf()) / 1000;
    const seconds = Math.max(request.intervalMs / 1000, least, Math.ceil(range / SAFE_POINTS));
    const rate = Math.max(seconds + scrape, 4 * scrape);
    const text = (value: string) => ({ text: value, value });
    return {
      seconds,
      scopedVars: {
        ...request.scopedVars,
        __interval: text(`${seconds}s`),
        __interval_ms: text(String(seconds * 1000)),
        __rate_interval: text(`${rate}s`),
        ...rangeVariables(request.range),
      },
    };
  }

  /** Values of a variable's query: `label_values(label)`, `label_values(selector, label)`, `query_result(expr)`. */
  async metricFindQuery(
    query: string | { query: string },
    options?: LegacyMetricFindQueryOptions,
  ): Promise<MetricFindValue[]> {
    const range = options?.range;
    const text = interpolate(typeof query === 'string' ? query : query.query, {
      ...options?.scopedVars,
      ...(range ? rangeVariables(range) : {}),
    });
    const window: Record<string, string> = range
      ? { start: String(range.from.valueOf() / 1000), end: String(range.to.valueOf() / 1000) }
      : {};
    const values = /^label_values\((?:(.+),\s*)?([a-zA-Z_][a-zA-Z0-9_]*)\)\s*$/s.exec(text);
    if (values) {
      const [, selector, label] = values;
      const match: Record<string, string> = selector ? { 'match[]': selector.trim() } : {};
      const found = (await this.get(`label/${label}/values`, { ...match, ...window })) as string[];
      return found.map((value) => ({ text: value }));
    }
    const result = /^query_result\((.+)\)\s*$/s.exec(text);
    if (result?.[1]) {
      const answer = (await this.get('query', { query: result[1], time: window.end ?? '' })) as { result: Result[] };
      return answer.result.map(({ metric, value }) => ({ text: `${labelText(metric)} ${value?.[1]} ${value?.[0]}` }));
    }
    throw new Error(`not a variable query: ${text}`);
  }

  private async get(path: string, parameters: Record<string, string>): Promise<unknown> {
    // By POST, as Grafana does: a long expression must not hit a limit on the length of a URL.
    const asGet = path.startsWith('label/');
    const body = new URLSearchParams(parameters);
    const url = `/prometheus/api/v1/${path}`;
    const answer = await (asGet ? fetch(`${url}?${body}`) : fetch(url, { method: 'POST', body }));
    const content = (await answer.json()) as { status: string; error?: string; data: unknown };
    if (content.status !== 'success') {
      throw new Error(`${content.error} in ${parameters.query ?? parameters['match[]'] ?? path}`);
    }
    return content.data;
  }

  async testDatasource() {
    await this.get('query', { query: '1' });
    return { status: 'success' as const, message: 'ok' };
  }
}

function rangeVariables(range: TimeRange): ScopedVars {
  const milliseconds = range.to.valueOf() - range.from.valueOf();
  const seconds = Math.round(milliseconds / 1000);
  return {
    __range_ms: { text: milliseconds, value: milliseconds },
    __range_s: { text: seconds, value: seconds },
    __range: { text: `${seconds}s`, value: `${seconds}s` },
  };
}

function align(seconds: number, step: number): number {
  return Math.floor(seconds / step) * step;
}

interface VariableShape {
  multi?: boolean;
  includeAll?: boolean;
}

/** Escape values of variables as Grafana's Prometheus data source does. */
function interpolate(text: string, scopedVars: ScopedVars | undefined): string {
  return getTemplateSrv().replace(text, scopedVars, (value: string | string[], variable: VariableShape) => {
    if (!variable.multi && !variable.includeAll) {
      return String(value).replace(/\\/g, '\\\\').replace(/'/g, "\\\\'");
    }
    const escaped = [value].flat().map(escapeRegex);
    return escaped.length === 1 ? escaped[0] : `(${escaped.join('|')})`;
  });
}

function escapeRegex(value: string): string {
  return value.replace(/\\/g, '\\\\\\\\').replace(/[$^*{}[\]'+?.()|]/g, '\\\\$&');
}

function labelText({ __name__: name, ...labels }: Labels): string {
  const inner = Object.entries(labels).map(([key, value]) => `${key}="${value}"`);
  return `${name ?? ''}${inner.length || !name ? `{${inner.join(', ')}}` : ''}`;
}

/** The name of a series; undefined for "auto" with labels, where the panel names it by the labels that differ. */
function legend(target: PrometheusQuery, labels: Labels, expr: string): string | undefined {
  const format = target.legendFormat ?? '';
  if (format === '__auto') {
    return Object.keys(labels).length > 0 ? undefined : expr;
  }
  if (format) {
    return format.replace(/\{\{\s*(.+?)\s*\}\}/g, (_, label: string) => labels[label] ?? '');
  }
  const text = labelText(labels);
  return text === '{}' ? expr : text;
}

function parse(value: string): number {
  return value === '+Inf' ? Infinity : value === '-Inf' ? -Infinity : Number(value);
}

function toFrames(
  answer: { resultType: string; result: Result[] | Sample },
  target: PrometheusQuery,
  expr: string,
  step?: number,
): DataFrame[] {
  const results: Result[] =
    answer.resultType === 'scalar' ? [{ metric: {}, value: answer.result as Sample }] : (answer.result as Result[]);
  return results.map(({ metric, value, values }) => {
    const samples = values ?? (value ? [value] : []);
    const name = legend(target, metric, expr);
    return createDataFrame({
      refId: target.refId,
      name,
      meta: { executedQueryString: `Expr: ${expr}` },
      fields: [
        {
          name: 'Time',
          type: FieldType.time,
          config: step ? { interval: step * 1000 } : {},
          values: samples.map(([time]) => time * 1000),
        },
        {
          name: 'Value',
          type: FieldType.number,
          labels: metric,
          config: name === undefined ? {} : { displayNameFromDS: name },
          values: samples.map(([, text]) => parse(text)),
        },
      ],
    });
  });
}

/** One frame with the columns Time, each label, and `Value` (`Value #A` where several targets are tables). */
function toTable(frames: DataFrame[], refId: string, tables: number): DataFrame[] {
  if (frames.every((frame) => frame.length === 0)) {
    return frames;
  }
  const rows = frames.flatMap((frame) => {
    const [time, value] = frame.fields as [Field, Field];
    return time.values.map((at: number, index: number) => ({
      at,
      value: value.values[index] as number,
      labels: value.labels ?? {},
    }));
  });
  const names = [...new Set(rows.flatMap(({ labels }) => Object.keys(labels).sort()))];
  return [
    createDataFrame({
      refId,
      meta: { ...frames[0]?.meta, preferredVisualisationType: 'rawPrometheus' },
      fields: [
        { name: 'Time', type: FieldType.time, config: {}, values: rows.map(({ at }) => at) },
        ...names.map((name) => ({
          name,
          type: name === 'le' ? FieldType.number : FieldType.string,
          config: { filterable: true },
          values: rows.map(({ labels }) => (name === 'le' ? parse(labels[name] ?? '') : (labels[name] ?? ''))),
        })),
        {
          name: tables > 1 ? `Value #${refId}` : 'Value',
          type: FieldType.number,
          config: {},
          values: rows.map(({ value }) => value),
        },
      ],
    }),
  ];
}
