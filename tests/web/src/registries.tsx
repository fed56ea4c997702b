/** What Grafana's core gives its packages at start: registries, services, translations. Call before the first render. */
import {
  type DataFrame,
  type DataQueryRequest,
  type DataQueryResponse,
  type DataSourceApi,
  type DataSourceInstanceSettings,
  type DataSourceRef,
  EventBusSrv,
  type FieldConfigPropertyItem,
  FieldType,
  LoadingState,
  type PanelData,
  PluginType,
  type ScopedVars,
  type StandardEditorsRegistryItem,
  type TransformerRegistryItem,
  ThresholdsMode,
  displayNameOverrideProcessor,
  identityOverrideProcessor,
  locationUtil,
  numberOverrideProcessor,
  dataLinksOverrideProcessor,
  preProcessPanelData,
  standardEditorsRegistry,
  standardFieldConfigEditorRegistry,
  standardTransformers,
  standardTransformersRegistry,
  stringOverrideProcessor,
  thresholdsOverrideProcessor,
  toDataFrame,
  unitOverrideProcessor,
  valueMappingsOverrideProcessor,
  booleanOverrideProcessor,
} from '@grafana/data';
import { initPluginTranslations } from '@grafana/i18n';
import {
  config,
  setAppEvents,
  setDataSourceSrv,
  setPluginImportUtils,
  setRunRequest,
  setTemplateSrv,
  toDataQueryError,
} from '@grafana/runtime';
import { loadResources, sceneGraph } from '@grafana/scenes';
import { Observable, catchError, concat, from, map, of } from 'rxjs';

import { panelPlugin } from './panels';
import { type Options, PrometheusDatasource } from './prometheus';

interface DataSourceEntry {
  uid: string;
  name: string;
  isDefault: boolean;
  interval: string;
}

const noEditor = () => null;

/** Field options that all panels share, with the ids, processors and defaults of Grafana's core. */
function standardFieldConfig(): FieldConfigPropertyItem[] {
  const item = (
    id: string,
    process: FieldConfigPropertyItem['process'],
    defaultValue?: unknown,
    numbersOnly = false,
  ): FieldConfigPropertyItem => ({
    id,
    path: id,
    name: id,
    editor: noEditor,
    override: noEditor,
    process,
    defaultValue,
    shouldApply: (field) => !numbersOnly || field.type === FieldType.number,
  });
  const thresholds = {
    mode: ThresholdsMode.Absolute,
    steps: [
      { value: -Infinity, color: 'green' },
      { value: 80, color: 'red' },
    ],
  };
  return [
    item('displayName', displayNameOverrideProcessor),
    item('unit', unitOverrideProcessor as never),
    item('min', numberOverrideProcessor as never, undefined, true),
    item('max', numberOverrideProcessor as never, undefined, true),
    item('fieldMinMax', booleanOverrideProcessor as never, undefined, true),
    item('decimals', numberOverrideProcessor as never, undefined, true),
    item('thresholds', thresholdsOverrideProcessor as never, thresholds),
    item('mappings', valueMappingsOverrideProcessor as never, []),
    item('noValue', stringOverrideProcessor as never),
    item('links', dataLinksOverrideProcessor as never),
    item('actions', identityOverrideProcessor),
    item('color', identityOverrideProcessor),
    item('filterable', booleanOverrideProcessor as never),
  ];
}

function standardEditors(): StandardEditorsRegistryItem[] {
  const ids = ['text', 'number', 'slider', 'boolean', 'radio', 'select', 'unit', 'color', 'fieldColor', 'stats-picker'];
  const more = [
    'strings',
    'timezone',
    'field-name',
    'links',
    'mappings',
    'thresholds',
    'multi-select',
    'dashboard-uid',
  ];
  return [...ids, ...more].map((id) => ({ id, name: id, editor: noEditor }));
}

function transformers(): TransformerRegistryItem[] {
  // One of them is there under two names.
  return [...new Set(Object.values(standardTransformers))].map((transformer) => ({
    id: transformer.id,
    name: transformer.name,
    transformation: () => Promise.resolve(transformer as never),
    editor: noEditor,
    imageDark: '',
    imageLight: '',
  }));
}

/** Run a request as Grafana's core does: first a loading state, then what came. */
function runRequest(
  datasource: DataSourceApi,
  request: DataQueryRequest,
  query?: (request: DataQueryRequest) => Promise<DataQueryResponse> | Observable<DataQueryResponse>,
): Observable<PanelData> {
  const start: PanelData = { state: LoadingState.Loading, series: [], request, timeRange: request.range };
  if (request.targets.length === 0) {
    return of({ ...start, state: LoadingState.Done });
  }
  const answer = query ? query(request) : datasource.query(request);
  const packets = (answer instanceof Observable ? answer : from(answer)).pipe(
    map((packet): PanelData => {
      const series: DataFrame[] = packet.data.map((frame) => toDataFrame(frame));
      return preProcessPanelData({ ...start, state: LoadingState.Done, series });
    }),
    catchError((error) => {
      const shown = toDataQueryError(error);
      return of({ ...start, state: LoadingState.Error, error: shown, errors: [shown] });
    }),
  );
  return concat(of(start), packets);
}

function settingsOf({ uid, name, isDefault, interval }: DataSourceEntry): DataSourceInstanceSettings {
  const info = { author: { name: '' }, description: '', links: [], logos: { large: '', small: '' }, screenshots: [] };
  return {
    id: 0,
    uid,
    name,
    isDefault,
    type: 'prometheus',
    access: 'proxy',
    readOnly: true,
    jsonData: { timeInterval: interval } as Options,
    meta: {
      id: 'prometheus',
      name: 'Prometheus',
      type: PluginType.datasource,
      metrics: true,
      module: '',
      baseUrl: '',
      info: { ...info, updated: '', version: '' },
    },
  };
}

function registerDataSources(entries: DataSourceEntry[]): void {
  const all = entries.map(settingsOf).map((settings) => new PrometheusDatasource(settings as never));
  const settings = new Map(entries.map((entry) => [entry.uid, settingsOf(entry)]));
  const find = (ref?: DataSourceRef | string | null, scopedVars?: ScopedVars) => {
    const wanted = interpolate(typeof ref === 'string' ? ref : ref?.uid, scopedVars);
    const entry = entries.find(({ uid, name, isDefault }) =>
      !wanted || wanted === 'default' ? isDefault : uid === wanted || name === wanted,
    );
    return entry?.uid;
  };
  setDataSourceSrv({
    get: (ref, scopedVars) => {
      const found = all.find(({ uid }) => uid === find(ref, scopedVars));
      return found
        ? Promise.resolve(found as DataSourceApi)
        : Promise.reject(new Error(`no data source ${JSON.stringify(ref)}`));
    },
    getInstanceSettings: (ref, scopedVars) => settings.get(find(ref, scopedVars) ?? ''),
    getList: (filters) => [...settings.values()].filter(({ type }) => !filters?.pluginId || filters.pluginId === type),
    reload: () => Promise.resolve(),
    registerRuntimeDataSource: () => undefined,
  });
}

function interpolate(text: string | undefined, scopedVars?: ScopedVars, format?: unknown): string {
  if (!text) {
    return '';
  }
  const scene = (scopedVars?.__sceneObject?.value as { valueOf(): unknown } | undefined)?.valueOf();
  const context = scene ?? window.__grafanaSceneContext;
  return context ? sceneGraph.interpolate(context as never, text, scopedVars, format as never) : text;
}

declare global {
  interface Window {
    __grafanaSceneContext?: unknown;
  }
}

export async function registerAll(): Promise<void> {
  config.buildInfo = { ...config.buildInfo, version: '13.2.3' };
  standardEditorsRegistry.setInit(standardEditors);
  standardFieldConfigEditorRegistry.setInit(standardFieldConfig);
  standardTransformersRegistry.setInit(transformers);
  setAppEvents(new EventBusSrv());
  setTemplateSrv({
    getVariables: () => [],
    replace: interpolate as never,
    containsTemplate: (text) => /\$\{?\w|\[\[/.test(text ?? ''),
    updateTimeRange: () => undefined,
  });
  setRunRequest(runRequest as never);
  setPluginImportUtils({
    importPanelPlugin: (id) => Promise.resolve(panelPlugin(id)),
    getPanelPluginFromCache: (id) => panelPlugin(id),
  });
  locationUtil.initialize({
    config: config as never,
    getTimeRangeForUrl: () => ({ from: 'now-1h', to: 'now' }),
    getVariablesUrlParams: () => ({}),
  });
  await initPluginTranslations('grafana');
  await initPluginTranslations('grafana-scenes', [loadResources]);
  const answer = await fetch('/api/datasources');
  registerDataSources((await answer.json()) as DataSourceEntry[]);
}
