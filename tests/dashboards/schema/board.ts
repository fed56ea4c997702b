// A dashboard as Grafana 13 reads it, with the options and field settings of each kind of panel, from the types that
// Grafana publishes. Options are partial: Grafana fills in what is missing.
import type {
  Dashboard,
  FieldConfig,
  FieldConfigSource,
  Panel,
  RowPanel,
} from './node_modules/@grafana/schema/dist/types/raw/dashboard/x/types.gen';
import type { Options as BargaugeOptions } from './node_modules/@grafana/schema/dist/types/raw/composable/bargauge/panelcfg/x/types.gen';
import type { Options as NodegraphOptions } from './node_modules/@grafana/schema/dist/types/raw/composable/nodegraph/panelcfg/x/types.gen';
import type { Options as StatOptions } from './node_modules/@grafana/schema/dist/types/raw/composable/stat/panelcfg/x/types.gen';
import type { Options as StatetimelineOptions, FieldConfig as StatetimelineField } from './node_modules/@grafana/schema/dist/types/raw/composable/statetimeline/panelcfg/x/types.gen';
import type { Options as TableOptions, FieldConfig as TableField } from './node_modules/@grafana/schema/dist/types/raw/composable/table/panelcfg/x/types.gen';
import type { Options as TextOptions } from './node_modules/@grafana/schema/dist/types/raw/composable/text/panelcfg/x/types.gen';
import type { Options as TimeseriesOptions, FieldConfig as TimeseriesField } from './node_modules/@grafana/schema/dist/types/raw/composable/timeseries/panelcfg/x/types.gen';

interface Fields<Custom> {
  defaults: Omit<FieldConfig, 'custom'> & { custom?: Partial<Custom> };
  overrides: FieldConfigSource['overrides'];
}

interface Of<Kind extends string, Options, Custom> extends Omit<Panel, 'type' | 'options' | 'fieldConfig'> {
  type: Kind;
  options: Partial<Options>;
  fieldConfig: Fields<Custom>;
}

export interface Board extends Omit<Dashboard, 'panels'> {
  panels: Array<
    | RowPanel
    | Of<'bargauge', BargaugeOptions, {}>
    | Of<'nodeGraph', NodegraphOptions, {}>
    | Of<'stat', StatOptions, {}>
    | Of<'state-timeline', StatetimelineOptions, StatetimelineField>
    | Of<'table', TableOptions, TableField>
    | Of<'text', TextOptions, {}>
    | Of<'timeseries', TimeseriesOptions, TimeseriesField>
  >;
}
