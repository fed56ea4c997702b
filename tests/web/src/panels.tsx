/**
 * The panels. Tables and time series are Grafana's own components with the options and defaults of their plugins; stat,
 * gauge and bar gauge are the components that those plugins draw with. Every other panel is not on npm: a table of the
 * query's result stands in for it, and says so.
 */
import {
  type DataFrame,
  type FieldConfigEditorBuilder,
  FieldColorModeId,
  type FieldConfigPropertyItem,
  FieldType,
  PanelPlugin,
  type PanelProps,
  PluginType,
  VizOrientation,
  applyFieldOverrides,
  cacheFieldDisplayNames,
  getFieldDisplayName,
  getFieldDisplayValues,
  identityOverrideProcessor,
  renderMarkdown,
  toDataFrame,
} from '@grafana/data';
import { config } from '@grafana/runtime';
import { BarGaugeDisplayMode, BigValueColorMode, BigValueGraphMode } from '@grafana/schema';
import {
  BarGauge,
  BigValue,
  TimeSeries,
  TooltipPlugin2,
  VizRepeater,
  VizTooltipContent,
  VizTooltipHeader,
  VizTooltipWrapper,
} from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import { type ReactNode, useMemo } from 'react';

type Defaults = Record<string, unknown>;

const hideFrom = { tooltip: false, viz: false, legend: false };

const timeSeriesFields: Defaults = {
  drawStyle: 'line',
  lineInterpolation: 'linear',
  barAlignment: 0,
  barWidthFactor: 0.6,
  lineWidth: 1,
  fillOpacity: 0,
  gradientMode: 'none',
  fillBelowTo: undefined,
  lineStyle: undefined,
  lineColor: undefined,
  fillColor: undefined,
  pointColor: undefined,
  spanNulls: false,
  insertNulls: false,
  showPoints: 'auto',
  showValues: false,
  pointSize: 5,
  stacking: { mode: 'none', group: 'A' },
  transform: undefined,
  axisPlacement: 'auto',
  axisLabel: '',
  axisWidth: undefined,
  axisSoftMin: undefined,
  axisSoftMax: undefined,
  axisGridShow: undefined,
  axisCenteredZero: false,
  axisBorderShow: false,
  axisColorMode: 'text',
  scaleDistribution: { type: 'linear' },
  hideFrom,
  thresholdsStyle: { mode: 'off' },
};

const tableFields: Defaults = {
  width: undefined,
  minWidth: undefined,
  align: 'auto',
  cellOptions: { type: 'auto' },
  wrapHeaderText: undefined,
  wrapText: undefined,
  inspect: false,
  filterable: undefined,
  sortable: undefined,
  hideFrom: { viz: false },
  hideHeader: undefined,
  footer: { reducers: [] },
  tooltip: undefined,
};

function customFields(defaults: Defaults) {
  return (builder: FieldConfigEditorBuilder<object>) => {
    for (const [path, defaultValue] of Object.entries(defaults)) {
      builder.addCustomEditor({
        id: path,
        path,
        name: path,
        editor: () => null,
        override: () => null,
        process: identityOverrideProcessor,
        shouldApply: () => true,
        defaultValue,
      } as never as FieldConfigPropertyItem);
    }
  };
}

function NoData({ data, fieldConfig }: PanelProps): ReactNode {
  const text = data.errors?.[0]?.message ?? fieldConfig.defaults.noValue ?? 'No data';
  return (
    <div data-empty="true" style={{ display: 'grid', placeItems: 'center', height: '100%' }}>
      {text}
    </div>
  );
}

function isEmpty(frames: DataFrame[]): boolean {
  return frames.every((frame) => frame.length === 0 || frame.fields.length === 0);
}

function visible(frame: DataFrame): DataFrame {
  return { ...frame, fields: frame.fields.filter((field) => !field.config.custom?.hideFrom?.viz) };
}

/** As Grafana's panel prepares its frames: those with times, and null for what is no finite number. */
function graphable(frames: DataFrame[]): DataFrame[] {
  const timed = frames.filter(({ length, fields }) => length > 0 && fields.some(({ type }) => type === FieldType.time));
  const shown = timed.map((frame) => ({
    ...frame,
    fields: frame.fields.map((field) =>
      field.type === FieldType.number
        ? { ...field, values: field.values.map((value) => (Number.isFinite(value) ? value : null)) }
        : field,
    ),
  }));
  cacheFieldDisplayNames(shown);
  return shown;
}

function TimeSeriesPanel(props: PanelProps): ReactNode {
  const { data, width, height, timeRange, timeZone, options } = props;
  const frames = useMemo(() => graphable(data.series), [data.series]);
  if (isEmpty(frames)) {
    return <NoData {...props} />;
  }
  const hover = options.tooltip?.mode === 'multi' ? 1 : 0;
  return (
    <TimeSeries
      frames={frames}
      structureRev={data.structureRev}
      width={width}
      height={height}
      timeRange={timeRange}
      timeZone={timeZone}
      legend={options.legend}
      options={options}
    >
      {(uplot, aligned) =>
        options.tooltip?.mode === 'none' ? null : (
          <TooltipPlugin2
            config={uplot}
            hoverMode={hover}
            render={(_u, indexes, series) => {
              const at = indexes.find((index) => index !== null);
              const [time, ...fields] = aligned.fields;
              if (at === undefined || at === null || !time) {
                return null;
              }
              const shown = hover === 1 ? fields : fields.filter((_field, index) => index + 1 === series);
              const content = shown
                .filter((field) => field.values[at] !== null && field.values[at] !== undefined)
                .map((field) => {
                  const value = field.display?.(field.values[at]);
                  const text = value ? `${value.prefix ?? ''}${value.text}${value.suffix ?? ''}` : '';
                  return { label: getFieldDisplayName(field, aligned, data.series), value: text, color: value?.color };
                });
              return (
                <VizTooltipWrapper>
                  <VizTooltipHeader
                    item={{ label: time.display?.(time.values[at]).text ?? '', value: '' }}
                    isPinned={false}
                  />
                  <VizTooltipContent items={content} isPinned={false} />
                </VizTooltipWrapper>
              );
            }}
          />
        )
      }
    </TimeSeries>
  );
}

function TablePanel(props: PanelProps): ReactNode {
  const { data, width, height, options, fieldConfig, timeRange } = props;
  // The table reads its headings, and what it sorts by, from here.
  cacheFieldDisplayNames(data.series);
  const frame = data.series[options.frameIndex ?? 0] ?? data.series[0];
  if (!frame || isEmpty([frame])) {
    return <NoData {...props} />;
  }
  return (
    <div data-frames={data.series.length}>
      <TableNG
        data={frame}
        width={width}
        height={height}
        noHeader={!options.showHeader}
        showTypeIcons={options.showTypeIcons}
        resizable
        sortBy={options.sortBy}
        enablePagination={options.enablePagination}
        cellHeight={options.cellHeight}
        maxRowHeight={options.maxRowHeight}
        frozenColumns={options.frozenColumns?.left}
        timeRange={timeRange}
        fieldConfig={fieldConfig}
        structureRev={data.structureRev}
        noValue={fieldConfig.defaults.noValue}
        disableSanitizeHtml={false}
        getActions={() => []}
      />
    </div>
  );
}

function displayValues({ data, options, fieldConfig, replaceVariables, timeZone }: PanelProps) {
  return getFieldDisplayValues({
    data: data.series,
    reduceOptions: options.reduceOptions,
    fieldConfig,
    replaceVariables,
    theme: config.theme2,
    sparkline: options.graphMode !== BigValueGraphMode.None,
    timeZone,
  });
}

function orientation(value: unknown): VizOrientation {
  return (value as VizOrientation) ?? VizOrientation.Auto;
}

function StatPanel(props: PanelProps): ReactNode {
  const { data, width, height, options, renderCounter } = props;
  if (isEmpty(data.series)) {
    return <NoData {...props} />;
  }
  return (
    <VizRepeater
      getValues={() => displayValues(props)}
      renderValue={({ value, width: wide, height: high, count }) => {
        const content = (extra: object) => (
          <BigValue
            value={value.display}
            count={count}
            sparkline={value.sparkline}
            colorMode={options.colorMode}
            graphMode={options.graphMode}
            justifyMode={options.justifyMode}
            textMode={options.textMode}
            text={options.text}
            percentChangeColorMode={options.percentChangeColorMode}
            width={wide}
            height={high}
            theme={config.theme2}
            {...extra}
          />
        );
        const [link] = value.hasLinks ? (value.getLinks?.() ?? []) : [];
        return link ? (
          <a href={link.href} title={link.title}>
            {content({})}
          </a>
        ) : (
          content({})
        );
      }}
      width={width}
      height={height}
      source={data}
      itemSpacing={3}
      renderCounter={renderCounter}
      autoGrid
      orientation={orientation(options.orientation)}
    />
  );
}

function BarGaugePanel(props: PanelProps): ReactNode {
  const { data, width, height, options, renderCounter } = props;
  if (isEmpty(data.series)) {
    return <NoData {...props} />;
  }
  return (
    <VizRepeater
      getValues={() => displayValues(props)}
      renderValue={({ value, width: wide, height: high, orientation: way }) => (
        <BarGauge
          value={value.display}
          width={wide}
          height={high}
          orientation={way}
          field={value.field}
          text={options.text}
          display={value.view?.getFieldDisplayProcessor(value.colIndex as number)}
          theme={config.theme2}
          itemSpacing={10}
          lcdCellWidth={12}
          displayMode={options.displayMode ?? BarGaugeDisplayMode.Gradient}
          valueDisplayMode={options.valueMode}
          namePlacement={options.namePlacement}
        />
      )}
      width={width}
      height={height}
      source={data}
      itemSpacing={10}
      renderCounter={renderCounter}
      orientation={orientation(options.orientation)}
    />
  );
}

function TextPanel({ options, replaceVariables }: PanelProps): ReactNode {
  const html = renderMarkdown(replaceVariables(options.content ?? ''));
  return <div className="markdown-html" dangerouslySetInnerHTML={{ __html: html }} />;
}

/** A table of the result: of a table's frames each, of series one row each with the last value. */
function StandIn(props: PanelProps & { kind: string }): ReactNode {
  const { data, width, height, kind, fieldConfig } = props;
  const note = 28;
  if (isEmpty(data.series)) {
    return <NoData {...props} />;
  }
  const series = data.series.every((frame) => frame.fields.length === 2 && frame.fields[0]?.type === FieldType.time);
  const frames = series ? [lastValues(data.series)] : data.series.map(visible);
  const each = Math.floor((height - note) / frames.length);
  return (
    <div data-stand-in={kind}>
      <div style={{ height: note, fontStyle: 'italic', opacity: 0.7 }}>
        Stand-in: the data of this {kind} panel, whose drawing is not on npm
      </div>
      {frames.map((frame, index) => (
        <TableNG key={index} data={frame} width={width} height={each} fieldConfig={fieldConfig} getActions={() => []} />
      ))}
    </div>
  );
}

function lastValues(frames: DataFrame[]): DataFrame {
  const values = frames.flatMap(({ fields }) => fields.slice(1));
  const frame = toDataFrame({
    fields: [
      {
        name: 'Series',
        type: FieldType.string,
        values: values.map((field, index) => getFieldDisplayName(field, frames[index], frames)),
      },
      {
        name: 'Last value',
        type: FieldType.string,
        values: values.map((field) => {
          const shown = field.display?.(field.values.at(-1));
          return shown ? `${shown.prefix ?? ''}${shown.text}${shown.suffix ?? ''}` : '';
        }),
      },
    ],
  });
  const [shown] = applyFieldOverrides({
    data: [frame],
    fieldConfig: { defaults: {}, overrides: [] },
    replaceVariables: (text) => text,
    theme: config.theme2,
  });
  return shown as DataFrame;
}

const plugins = new Map<string, PanelPlugin>();

function identify(id: string, plugin: PanelPlugin): PanelPlugin {
  const info = { author: { name: '' }, description: '', links: [], logos: { large: '', small: '' }, screenshots: [] };
  plugin.meta = {
    id,
    name: id,
    sort: 0,
    type: PluginType.panel,
    module: '',
    baseUrl: '',
    skipDataQuery: id === 'text',
    info: { ...info, updated: '', version: '' },
  } as never;
  plugins.set(id, plugin);
  return plugin;
}

const byValue = { color: { settings: { byValueSupport: true }, defaultValue: { mode: FieldColorModeId.Thresholds } } };

identify(
  'timeseries',
  new PanelPlugin(TimeSeriesPanel).useFieldConfig({
    standardOptions: {
      color: {
        settings: { byValueSupport: true, bySeriesSupport: true, preferThresholdsMode: false },
        defaultValue: { mode: FieldColorModeId.PaletteClassic },
      },
    } as never,
    useCustomConfig: customFields(timeSeriesFields),
  }),
);
identify(
  'table',
  new PanelPlugin(TablePanel).setNoPadding().useFieldConfig({ useCustomConfig: customFields(tableFields) }),
);
identify('stat', new PanelPlugin(StatPanel).useFieldConfig({ standardOptions: byValue as never }));
identify('bargauge', new PanelPlugin(BarGaugePanel).useFieldConfig({ standardOptions: byValue as never }));
identify('text', new PanelPlugin(TextPanel));

plugins.get('timeseries')?.setPanelOptions((builder) => {
  builder
    .addTextInput({ path: 'legend.displayMode', name: '', defaultValue: 'list' })
    .addTextInput({ path: 'legend.placement', name: '', defaultValue: 'bottom' })
    .addBooleanSwitch({ path: 'legend.showLegend', name: '', defaultValue: true })
    .addTextInput({ path: 'legend.calcs', name: '', defaultValue: [] as never })
    .addTextInput({ path: 'tooltip.mode', name: '', defaultValue: 'single' })
    .addTextInput({ path: 'tooltip.sort', name: '', defaultValue: 'none' });
});
plugins.get('table')?.setPanelOptions((builder) => {
  builder
    .addNumberInput({ path: 'frameIndex', name: '', defaultValue: 0 })
    .addBooleanSwitch({ path: 'showHeader', name: '', defaultValue: true })
    .addTextInput({ path: 'cellHeight', name: '', defaultValue: 'sm' })
    .addBooleanSwitch({ path: 'showTypeIcons', name: '', defaultValue: false });
});
for (const id of ['stat', 'bargauge']) {
  plugins.get(id)?.setPanelOptions((builder) => {
    builder
      .addTextInput({ path: 'reduceOptions.calcs', name: '', defaultValue: ['lastNotNull'] as never })
      .addBooleanSwitch({ path: 'reduceOptions.values', name: '', defaultValue: false })
      .addTextInput({ path: 'reduceOptions.fields', name: '', defaultValue: '' })
      .addTextInput({ path: 'orientation', name: '', defaultValue: 'auto' })
      .addTextInput({ path: 'colorMode', name: '', defaultValue: BigValueColorMode.Value })
      .addTextInput({ path: 'graphMode', name: '', defaultValue: BigValueGraphMode.Area })
      .addTextInput({ path: 'justifyMode', name: '', defaultValue: 'auto' })
      .addTextInput({ path: 'textMode', name: '', defaultValue: 'auto' })
      .addTextInput({ path: 'valueMode', name: '', defaultValue: 'color' })
      .addTextInput({ path: 'namePlacement', name: '', defaultValue: 'auto' });
  });
}

/** The plugin of a panel type; a stand-in for one that is not on npm. */
export function panelPlugin(id: string): PanelPlugin {
  const found = plugins.get(id);
  if (found) {
    return found;
  }
  const Panel = (props: PanelProps) => <StandIn {...props} kind={id} />;
  // Any field option: what is right for a panel that is not here cannot be said here.
  return identify(id, new PanelPlugin(Panel).useFieldConfig({ useCustomConfig: customFields(tableFields) }));
}

/** Whether a panel of this type is drawn by Grafana's own components, so that its options can be checked. */
export function isDrawn(id: string): boolean {
  return ['timeseries', 'table', 'stat', 'bargauge', 'text'].includes(id);
}
