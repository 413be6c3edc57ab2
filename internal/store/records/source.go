package records

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/selector"
	"fleetd/internal/store/database"
)

const (
	// few is up to how many devices are checked individually for a text, before the index of all
	// texts is searched instead; and looked up and sorted for each page, before all devices are
	// read in the requested order.
	few = 4_000
	// maxCounted is how many entries of an index are counted at most to choose one, if there are
	// no maintained counts.
	maxCounted = few + 1
	// maxArms is how many values of a field one statement merges.
	maxArms = selector.MaxValues
)

// arm is one range of an index with devices in order of ids.
type arm struct {
	where string // with ? for arguments
	args  []any
}

// source is the origin of a list's ids: ranges of one index. Each device is in at most one of them.
type source struct {
	table string
	arms  []arm
	// dimension and values identify the maintained counts of these devices; without them the
	// devices are counted, up to maxCounted.
	dimension string
	values    []string
	exact     bool // it contains exactly the devices of its term
	// without is excluded from a source with one arm, on SQLite.
	without *source
}

// allDevices has the counts of all devices.
var allDevices = &source{dimension: database.CountState, values: []string{database.StateOnline, database.StateOffline}}

// isKept reports whether the number of its devices is maintained.
func (src *source) isKept() bool { return src.dimension != "" && len(src.values) > 0 }

// counting orders sources by the cost of counting them.
func (src *source) counting() int {
	if src.isKept() {
		return 0
	}
	return 1
}

// literals returns the values of a term with `=` or `in` without globs.
func literals(t *selector.Term) (values []string, ok bool) {
	if t.Op != selector.OpIn {
		return nil, false
	}
	for _, v := range t.Values {
		switch {
		case v.Parts != nil:
			return nil, false
		case v.Text == "" && t.Field != selector.FieldLabel: // no device has it
		case database.IsText(v.Text):
			values = append(values, v.Text)
		case t.Field == selector.FieldLabel: // values that are not text may be stored differently
			return nil, false
		}
	}
	return values, true
}

// sourceOf returns the source of a term; nil: there is none.
func sourceOf(t *selector.Term, tools *toolMatch) *source {
	values, ok := literals(t)
	each := func(table, where, dimension string, values []string) *source {
		s := &source{table: table, dimension: dimension, values: values, exact: true}
		for _, v := range values {
			s.arms = append(s.arms, arm{where, []any{v}})
		}
		if len(s.arms) > maxArms {
			return nil
		}
		return s
	}
	switch {
	case t.Field == selector.FieldSeen && t.Op == selector.OpGreater,
		t.Field == selector.FieldReason && t.Op == selector.OpHas:
		return &source{table: "presence", arms: []arm{{where: "NOT online"}}, dimension: database.CountState, values: []string{database.StateOffline}}
	case (t.Field == selector.FieldTransport || t.Field == selector.FieldNode) && t.Op == selector.OpHas:
		return &source{table: "presence", arms: []arm{{where: "online"}}, dimension: database.CountState, values: []string{database.StateOnline}}
	case t.Field == selector.FieldTool && tools != nil && t.Op == selector.OpIn:
		return each("presence", `catalog <> '' AND catalog COLLATE "binary" = ?`, database.CountCatalog, tools.hashes)
	case !ok:
		return nil
	}
	switch t.Field {
	case selector.FieldState:
		online, offline := slices.Contains(values, database.StateOnline), slices.Contains(values, database.StateOffline)
		switch {
		case online && offline:
			return nil
		case online:
			return &source{table: "presence", arms: []arm{{where: "online"}}, dimension: database.CountState, values: []string{database.StateOnline}, exact: true}
		case offline:
			return &source{table: "presence", arms: []arm{{where: "NOT online"}}, dimension: database.CountState, values: []string{database.StateOffline}, exact: true}
		}
		return &source{table: "presence"} // states that only memory has
	case selector.FieldTransport:
		return each("presence", `online AND transport COLLATE "binary" = ?`, database.CountTransport, values)
	case selector.FieldNode:
		return each("presence", `online AND node COLLATE "binary" = ?`, database.CountNode, values)
	case selector.FieldReason:
		return each("presence", `NOT online AND reason COLLATE "binary" = ?`, database.CountReason, values)
	case selector.FieldBoard:
		return each("devices", "board = ?", database.CountBoard, values)
	case selector.FieldFirmware:
		return each("devices", "firmware = ?", database.CountFirmware, values)
	case selector.FieldName:
		folded := make([]string, len(values))
		for i, v := range values {
			folded[i] = strings.ToLower(v)
		}
		slices.Sort(folded)
		s := each("devices", "name_folded = ?", "", slices.Compact(folded))
		s.exact = false
		return s
	case selector.FieldLabel:
		if !database.IsText(t.Label) {
			return nil
		}
		s := &source{table: "device_labels", exact: true}
		for _, v := range values {
			s.arms = append(s.arms, arm{"key = ? AND value = ?", []any{t.Label, v}})
		}
		return s
	}
	return nil
}

// spread returns the source of a term with globs or comparisons, if few distinct values are stored.
func (s *Records) spread(ctx context.Context, t *selector.Term, now time.Time) (*source, error) {
	var table, column, where string
	var args []any
	out := &source{exact: true}
	switch t.Field {
	case selector.FieldBoard:
		table, column, where, out.dimension = "devices", "board", "TRUE", database.CountBoard
	case selector.FieldFirmware:
		table, column, where, out.dimension = "devices", "firmware", "TRUE", database.CountFirmware
	case selector.FieldReason:
		table, column, where, out.dimension = "presence", `reason COLLATE "binary"`, "NOT online", database.CountReason
	case selector.FieldNode:
		table, column, where, out.dimension = "presence", `node COLLATE "binary"`, "online", database.CountNode
	case selector.FieldLabel:
		table, column, where, args = "device_labels", "value", "key = ?", []any{t.Label}
	default:
		return nil, nil
	}
	switch {
	case t.Op == selector.OpLacks, t.Op == selector.OpNotIn && (t.Field == selector.FieldLabel || table == "presence"):
		return nil, nil // devices without a value are in no range
	case len(args) > 0 && !database.IsText(t.Label):
		return nil, nil
	}
	values, err := s.distinct(ctx, table, column, where, args, maxArms+1)
	if err != nil || len(values) > maxArms {
		return nil, err
	}
	one, err := selector.Parse(t.String())
	if err != nil {
		return nil, nil // a label that Parse does not accept
	}
	out.table = table
	for _, v := range values {
		d := selector.Device{Board: v, Firmware: v, Online: table == "presence" && t.Field == selector.FieldNode, Node: v, Reason: v, Labels: map[string]string{t.Label: v}}
		if !one.Match(&d, now) {
			continue
		}
		condition := column + " = ?"
		if where != "TRUE" {
			condition = where + " AND " + condition
		}
		out.arms = append(out.arms, arm{condition, append(slices.Clone(args), v)})
		out.values = append(out.values, v)
	}
	return out, nil
}

// distinct returns at most limit values of a column in byte order. The column follows in an index
// after the columns that where fixes: each value costs one lookup.
func (s *Records) distinct(ctx context.Context, table, column, where string, args []any, limit int) ([]string, error) {
	var q query
	q.add("WITH RECURSIVE v (value, n) AS (SELECT a.value, 1 FROM (SELECT "+column+" AS value FROM "+table+" WHERE "+where+" ORDER BY "+column+" LIMIT 1) a"+
		" UNION ALL SELECT (SELECT "+column+" FROM "+table+" WHERE "+where+" AND "+column+" > v.value ORDER BY "+column+" LIMIT 1), v.n + 1"+
		" FROM v WHERE v.value IS NOT NULL AND v.n < ?) SELECT value FROM v WHERE value IS NOT NULL", append(append(slices.Clone(args), args...), int64(limit))...)
	return database.Collect(ctx, s.db.Read, database.Scalar[string], q.text.String(), q.args...)
}

// sizes caches for sizeTime how many devices a source has: reading a list page by page needs that
// repeatedly. It is safe for concurrent use; the zero value is ready to use.
type sizes struct {
	mu sync.Mutex
	by map[string]sizeAt
}

type sizeAt struct {
	n  int64
	at time.Time
}

const (
	sizeTime = 10 * time.Second
	maxSizes = 10_000
)

func (z *sizes) get(key string) (int64, bool) {
	z.mu.Lock()
	defer z.mu.Unlock()
	size, ok := z.by[key]
	return size.n, ok && time.Since(size.at) < sizeTime
}

func (z *sizes) put(key string, n int64) {
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.by == nil || len(z.by) >= maxSizes {
		z.by = map[string]sizeAt{}
	}
	z.by[key] = sizeAt{n, time.Now()}
}

// size returns about how many devices a source has: up to most without maintained counts.
func (s *Records) size(ctx context.Context, src *source, most int64) (total int64, err error) {
	if src.isKept() {
		key := fmt.Sprint(src.dimension, src.values)
		n, ok := s.sizes.get(key)
		if !ok {
			args := []any{src.dimension}
			for _, v := range src.values {
				args = append(args, v)
			}
			n, err = s.number(ctx, "SELECT CAST(sum(n) AS BIGINT) FROM fleet_counts WHERE dimension = ? AND value IN (?"+strings.Repeat(", ?", len(src.values)-1)+")", args)
			if err != nil {
				return 0, err
			}
			s.sizes.put(key, n)
		}
		return n, nil
	}
	for _, a := range src.arms {
		key := fmt.Sprint(src.table, most, a)
		n, ok := s.sizes.get(key)
		if !ok {
			n, err = s.number(ctx, "SELECT count(*) FROM (SELECT 1 AS one FROM "+src.table+" WHERE "+a.where+" LIMIT ?) a", append(slices.Clone(a.args), most))
			if err != nil {
				return 0, err
			}
			s.sizes.put(key, n)
		}
		if total += n; total >= most {
			return most, nil
		}
	}
	return total, nil
}

// number returns the single number of a query; 0 for NULL.
func (s *Records) number(ctx context.Context, text string, args []any) (int64, error) {
	var q query
	q.add(text, args...)
	var n sql.NullInt64
	err := s.db.Read.QueryRowContext(ctx, q.text.String(), q.args...).Scan(&n)
	return n.Int64, err
}

// plan describes how the devices of a query are found: ids from one index, in windows of limited size,
// each checked with the conditions.
type plan struct {
	query      devices.ListQuery
	text       string // query.Text in lower case
	now        time.Time
	needsTools bool
	ids        []string  // the devices by id; nil: no term contains ids
	none       bool      // no device matches
	source     *source   // nil: all devices
	size       int64     // of source, if it was counted
	others     []*source // of other terms
	search     bool      // ids come with their texts
	conditions []condition
	exact      bool // the conditions and the source are equivalent to the query
}

func (s *Records) planOf(ctx context.Context, q devices.ListQuery) (*plan, error) {
	p := &plan{query: q, text: strings.ToLower(q.Text), now: clock.Now().Truncate(time.Microsecond), exact: q.Text == "", needsTools: q.Select.Needs(selector.FieldTool)}
	if !database.IsText(p.text) {
		p.none = true
		return p, nil
	}
	type candidate struct {
		*source
		term int
	}
	var candidates []candidate
	terms := q.Select.Terms()
	conditions := make([]condition, len(terms))
	for i := range terms {
		t := &terms[i]
		if ids, ok := literals(t); ok && t.Field == selector.FieldDevice {
			if p.ids == nil {
				p.ids = append([]string{}, ids...)
			} else {
				p.ids = slices.DeleteFunc(p.ids, func(id string) bool { return !slices.Contains(ids, id) })
			}
			slices.Sort(p.ids)
			continue
		}
		var tools *toolMatch
		if t.Field == selector.FieldTool {
			var err error
			if tools, err = s.matchTools(ctx, t); err != nil {
				return nil, err
			}
		}
		conditions[i] = conditionOf(s.db.Postgres(), t, p.now, tools)
		if p.exact = p.exact && conditions[i].exact; p.ids == nil {
			if src := sourceOf(t, tools); src != nil {
				candidates = append(candidates, candidate{src, i})
			}
		}
	}
	if p.ids != nil {
		p.exact = false
		return p, nil
	}
	if len(candidates) == 0 {
		for i := range terms {
			src, err := s.spread(ctx, &terms[i], p.now)
			if err != nil {
				return nil, err
			}
			if src != nil {
				candidates = append(candidates, candidate{src, i})
			}
		}
	}
	sorted := q.Sort != devices.SortID
	slices.SortStableFunc(candidates, func(a, b candidate) int { return cmp.Compare(a.counting(), b.counting()) })
	best := -1
	for i, c := range candidates {
		if len(c.arms) == 0 {
			p.none = true
			return p, nil
		}
		n := int64(0)
		if len(candidates) > 1 || p.text != "" || sorted {
			look := true
			if last := i == len(candidates)-1; last && best >= 0 && p.text == "" && !sorted && !c.isKept() {
				all, err := s.size(ctx, allDevices, maxCounted)
				if err != nil {
					return nil, err
				}
				look = 2*p.size <= all // otherwise it cannot have many more
			}
			if look {
				var err error
				if n, err = s.size(ctx, c.source, maxCounted); err != nil {
					return nil, err
				}
			}
		}
		if best < 0 || n < p.size {
			best, p.size = i, n
		}
	}
	if best >= 0 && (sorted || p.text != "") && p.size > few {
		best = -1
	}
	for i, c := range candidates {
		if i != best {
			p.others = append(p.others, c.source)
		}
	}
	if best >= 0 {
		p.source = candidates[best].source
		if p.source.exact {
			conditions[candidates[best].term] = condition{}
		}
	}
	if p.text != "" {
		if p.search = p.source == nil && !sorted; p.search {
			p.conditions = append(p.conditions, textCondition(s.db.Postgres(), "w.search", p.text))
		} else {
			c := textCondition(s.db.Postgres(), "d.search", p.text)
			c.devices = true
			p.conditions = append(p.conditions, c)
		}
	}
	for _, c := range conditions {
		if c.text != "" && c.text != nothing.text {
			p.conditions = append(p.conditions, c)
		}
	}
	return p, nil
}
