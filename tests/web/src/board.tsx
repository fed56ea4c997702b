/** A board's JSON (classic schema) as a scene, the way Grafana's own dashboards are scenes. */
import {
  type DataLink,
  DashboardCursorSync,
  type FieldConfigSource,
  VariableHide,
  type VariableRefresh,
  type VariableSort,
  standardTransformersRegistry,
} from '@grafana/data';
import type { DataTransformerConfig } from '@grafana/schema';
import {
  CustomVariable,
  DataSourceVariable,
  EmbeddedScene,
  QueryVariable,
  SceneControlsSpacer,
  SceneDataTransformer,
  type SceneGridItemLike,
  SceneGridItem,
  SceneGridLayout,
  SceneGridRow,
  SceneQueryRunner,
  SceneRefreshPicker,
  SceneTimePicker,
  SceneTimeRange,
  type SceneVariable,
  SceneVariableSet,
  TextBoxVariable,
  VariableValueSelectors,
  VizPanel,
  behaviors,
} from '@grafana/scenes';

import { BoardLinks, PanelLinks } from './links';
import { isDrawn, panelPlugin } from './panels';
import type { PrometheusQuery } from './prometheus';
import { unsupported } from './unsupported';

interface VariableModel {
  type: string;
  name: string;
  label?: string;
  description?: string;
  query: string | { query: string };
  datasource?: { type?: string; uid: string };
  refresh?: VariableRefresh;
  sort?: VariableSort;
  regex?: string;
  allValue?: string;
  includeAll?: boolean;
  multi?: boolean;
  hide?: number;
  current?: { value?: string | string[]; text?: string | string[] };
}

export interface LinkModel extends DataLink {
  type: string;
  icon?: string;
  tags?: string[];
  asDropdown?: boolean;
  includeVars?: boolean;
  keepTime?: boolean;
  tooltip?: string;
}

interface PanelModel {
  id: number;
  type: string;
  title: string;
  description?: string;
  transparent?: boolean;
  pluginVersion?: string;
  gridPos: { x: number; y: number; w: number; h: number };
  datasource?: { type?: string; uid: string };
  targets?: PrometheusQuery[];
  transformations?: DataTransformerConfig[];
  options?: object;
  fieldConfig?: FieldConfigSource;
  maxDataPoints?: number | null;
  interval?: string;
  links?: DataLink[];
  collapsed?: boolean;
  panels?: PanelModel[];
  repeat?: string;
  timeFrom?: string;
  timeShift?: string;
}

export interface BoardModel {
  uid: string;
  title: string;
  tags: string[];
  time: { from: string; to: string };
  timezone?: string;
  refresh?: string;
  graphTooltip?: number;
  links?: LinkModel[];
  templating: { list: VariableModel[] };
  panels: PanelModel[];
}

export function buildScene(board: BoardModel): EmbeddedScene {
  return new EmbeddedScene({
    $timeRange: new SceneTimeRange({ ...board.time, timeZone: board.timezone || 'utc' }),
    $variables: new SceneVariableSet({ variables: board.templating.list.map(variable) }),
    $behaviors: [new behaviors.CursorSync({ sync: board.graphTooltip ?? DashboardCursorSync.Off })],
    controls: [
      new VariableValueSelectors({}),
      new SceneControlsSpacer(),
      new BoardLinks({ links: board.links ?? [] }),
      new SceneTimePicker({}),
      new SceneRefreshPicker({ refresh: board.refresh ?? '' }),
    ],
    body: new SceneGridLayout({ children: grid(board.panels), isDraggable: false, isResizable: false, isLazy: false }),
  });
}

function variable(model: VariableModel): SceneVariable {
  const common = {
    name: model.name,
    label: model.label,
    description: model.description,
    hide: (model.hide ?? VariableHide.dontHide) as never,
  };
  const choice = {
    ...common,
    value: model.current?.value ?? '',
    text: model.current?.text ?? '',
    allValue: model.allValue || undefined,
    includeAll: model.includeAll ?? false,
    defaultToAll: model.includeAll ?? false,
    isMulti: model.multi ?? false,
  };
  const query = typeof model.query === 'string' ? model.query : model.query?.query;
  switch (model.type) {
    case 'query':
      return new QueryVariable({
        ...choice,
        query: model.query as never,
        datasource: model.datasource ?? null,
        sort: model.sort,
        refresh: model.refresh,
        regex: model.regex ?? '',
      });
    case 'datasource':
      return new DataSourceVariable({
        ...choice,
        regex: model.regex ?? '',
        pluginId: query,
        defaultOptionEnabled: true,
      });
    case 'custom':
      return new CustomVariable({ ...choice, query });
    case 'textbox':
      return new TextBoxVariable({ ...common, value: String(model.current?.value ?? query ?? '') });
    default:
      unsupported(`variable ${model.name} of type ${model.type}`);
      return new TextBoxVariable({ ...common, value: '' });
  }
}

/** Rows of the classic schema own the panels that follow them, unless they are collapsed and hold them. */
function grid(panels: PanelModel[]): SceneGridItemLike[] {
  const top: SceneGridItemLike[] = [];
  let row: SceneGridRow | undefined;
  for (const panel of panels) {
    if (panel.type === 'row') {
      const { x, y } = panel.gridPos;
      row = new SceneGridRow({
        key: `panel-${panel.id}`,
        title: panel.title,
        isCollapsed: panel.collapsed ?? false,
        x,
        y,
        width: 24,
        height: 1,
        children: (panel.panels ?? []).map(item),
      });
      top.push(row);
      if (panel.collapsed) {
        row = undefined;
      }
    } else if (row) {
      row.setState({ children: [...row.state.children, item(panel)] });
    } else {
      top.push(item(panel));
    }
  }
  return top;
}

function item(panel: PanelModel): SceneGridItem {
  check(panel);
  const { x, y, w, h } = panel.gridPos;
  const runner = new SceneQueryRunner({
    datasource: panel.datasource,
    queries: panel.targets ?? [],
    maxDataPoints: panel.maxDataPoints ?? undefined,
    maxDataPointsFromWidth: true,
    minInterval: panel.interval,
  });
  return new SceneGridItem({
    key: `grid-item-${panel.id}`,
    x,
    y,
    width: w,
    height: h,
    body: new VizPanel({
      key: `panel-${panel.id}`,
      title: panel.title,
      description: panel.description,
      pluginId: panel.type,
      pluginVersion: panel.pluginVersion,
      options: panel.options ?? {},
      fieldConfig: panel.fieldConfig ?? { defaults: {}, overrides: [] },
      displayMode: panel.transparent ? 'transparent' : 'default',
      titleItems: panel.links?.length ? [new PanelLinks({ links: panel.links })] : undefined,
      $data: panel.targets?.length
        ? new SceneDataTransformer({ $data: runner, transformations: panel.transformations ?? [] })
        : undefined,
    }),
  });
}

/** Grafana drops unknown field options, transformations and settings without a word; here they are named. */
function check(panel: PanelModel): void {
  const where = `panel ${panel.id} "${panel.title}"`;
  for (const key of ['repeat', 'timeFrom', 'timeShift'] as const) {
    if (panel[key]) {
      unsupported(`${where}: ${key}`);
    }
  }
  for (const { id } of panel.transformations ?? []) {
    if (!standardTransformersRegistry.getIfExists(id)) {
      unsupported(`${where}: transformation ${id}`);
    }
  }
  if (!isDrawn(panel.type)) {
    return;
  }
  const known = panelPlugin(panel.type).fieldConfigRegistry;
  const { custom = {}, ...defaults } = panel.fieldConfig?.defaults ?? {};
  const used = [
    ...Object.keys(defaults),
    ...Object.keys(custom).map((name) => `custom.${name}`),
    ...(panel.fieldConfig?.overrides ?? []).flatMap(({ properties }) => properties.map(({ id }) => id)),
  ];
  for (const id of used) {
    // "custom.hideFrom.viz" sets a part of an option.
    const option = id.startsWith('custom.') ? id.split('.').slice(0, 2).join('.') : id;
    if (!known.getIfExists(option)) {
      unsupported(`${where}: field option ${id}`);
    }
  }
}
