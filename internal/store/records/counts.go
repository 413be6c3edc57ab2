package records

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/selector"
	"fleetd/internal/store/database"
)

const (
	// topCounts is how many values of a dimension are listed.
	topCounts = 200
	// countTime limits CountsOf and one window of Each if their caller does not.
	countTime = 30 * time.Second
	// maxLookedUp is up to how many devices CountsOf looks up individually, instead of reading
	// all.
	maxLookedUp = 50_000
)

// dimensions are the counted values of devices, in any order.
var dimensions = []string{database.CountState, database.CountReason, database.CountTransport, database.CountNode, database.CountMCP,
	database.CountBoard, database.CountFirmware}

// Counts returns the counts of the whole fleet, which are maintained with every write.
func (s *Records) Counts(ctx context.Context) (devices.Counts, error) {
	ctx, cancel, err := s.host.BeginRead(ctx)
	if err != nil {
		return devices.Counts{}, err
	}
	defer cancel()
	t := sums{}
	if err := s.addKept(ctx, t); err != nil {
		return devices.Counts{}, s.host.UseError(ctx, "reading the counts of the fleet", err)
	}
	return t.counts(s.now()), nil
}

// addKept adds the counts of the whole fleet.
func (s *Records) addKept(ctx context.Context, t sums) error {
	_, err := database.Collect(ctx, s.db.Read, func(scan func(...any) error) (_ struct{}, err error) {
		var dimension, value string
		var n int64
		err = scan(&dimension, &value, &n)
		t.add(dimension, value, n)
		return struct{}{}, err
	}, "SELECT dimension, value, CAST(sum(n) AS BIGINT) FROM fleet_counts WHERE dimension <> $1 GROUP BY dimension, value", database.CountCatalog)
	return err
}

// sums adds up devices by dimension and value.
type sums map[string]map[string]int64

func (t sums) add(dimension, value string, n int64) {
	if t[dimension] == nil {
		t[dimension] = map[string]int64{}
	}
	t[dimension][value] += n
}

func (t sums) counts(now time.Time) devices.Counts {
	c := devices.Counts{Total: t[database.CountState][database.StateOnline] + t[database.CountState][database.StateOffline],
		Dimensions: map[string]devices.Dimension{}, AsOf: now.UTC()}
	for _, name := range dimensions {
		d := devices.Dimension{Top: []devices.ValueCount{}}
		for value, n := range t[name] {
			if n > 0 {
				d.Top = append(d.Top, devices.ValueCount{Value: value, N: n})
			}
		}
		slices.SortFunc(d.Top, func(a, b devices.ValueCount) int { return cmp.Or(cmp.Compare(b.N, a.N), cmp.Compare(a.Value, b.Value)) })
		for _, rest := range d.Top[min(topCounts, len(d.Top)):] {
			d.Other += rest.N
		}
		d.Top = d.Top[:min(topCounts, len(d.Top))]
		c.Dimensions[name] = d
	}
	return c
}

func (t sums) row(row *devices.Row) {
	p := &row.Presence
	t.group(p.Online, row.Device.Admission != devices.AdmissionMember, p.Reason, string(p.Transport), p.Node, string(p.MCP), row.Device.Board, row.Device.Firmware, 1)
}

func (t sums) group(online, revoked bool, reason, transport, node, mcp, board, firmware string, n int64) {
	d := database.Deltas{}
	d.Presence(database.PresenceCounted{Online: online, Reason: reason, Transport: transport, Node: node, MCP: mcp}, n)
	d.Facts(board, firmware, n)
	if revoked {
		d.Add(database.CountState, database.StateRevoked, n)
	}
	for key, n := range d {
		t.add(key.Dimension, key.Value, n)
	}
}

// countColumns are the arguments of sums.group, except the number.
var countColumns = []string{"p.online", "(d.admission <> 'member')", "p.reason", "p.transport", "p.node", "p.mcp_state", "d.board", "d.firmware"}

// CountsOf returns the counts of the devices that a query selects; its order and page are ignored. It
// reads all devices that an index does not exclude.
func (s *Records) CountsOf(ctx context.Context, q devices.ListQuery) (devices.Counts, error) {
	if err := s.host.Usable(); err != nil {
		return devices.Counts{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, countTime)
	defer cancel()
	q.Sort = devices.SortID
	t := sums{}
	now := s.now()
	p, err := s.planOf(ctx, q)
	switch {
	case err != nil || p.none:
	case p.exact:
		err = s.count(ctx, p, t)
	default:
		err = s.each(ctx, p, "", func(row devices.Row) error { t.row(&row); return nil })
	}
	if err != nil {
		return devices.Counts{}, s.host.UseError(ctx, "counting devices", err)
	}
	return t.counts(now), nil
}

// count adds up the devices of a plan that SQL can evaluate. If these are almost all devices, it counts
// the others, and subtracts them from the maintained counts.
func (s *Records) count(ctx context.Context, p *plan, t sums) error {
	rest, err := s.restOf(ctx, p)
	if err != nil {
		return err
	}
	if rest == nil {
		return s.group(ctx, p, t)
	}
	few := sums{}
	if err := s.group(ctx, rest, few); err != nil {
		return err
	}
	if err := s.addKept(ctx, t); err != nil {
		return err
	}
	for dimension, values := range few {
		for value, n := range values {
			t.add(dimension, value, -n)
		}
	}
	// Both numbers are current. Values without devices are left out.
	switch {
	case p.source == nil || p.source.dimension != database.CountState:
	case p.source.values[0] == database.StateOnline:
		delete(t[database.CountState], database.StateOffline)
		delete(t, database.CountReason)
	default:
		delete(t[database.CountState], database.StateOnline)
		delete(t, database.CountTransport)
		delete(t, database.CountNode)
	}
	return nil
}

// restOf returns the plan of the devices that are not selected, if the query has one term, most
// devices match it, and the others are in a source.
func (s *Records) restOf(ctx context.Context, p *plan) (*plan, error) {
	terms := p.query.Select.Terms()
	if len(terms) != 1 || !p.exact || p.source != nil && len(p.conditions) > 0 {
		return nil, nil
	}
	all, err := s.size(ctx, allDevices, maxCounted)
	if err != nil {
		return nil, err
	}
	t := terms[0]
	not, ok := selector.Not(t)
	switch {
	case t.Op == selector.OpNotIn:
		rest, err := s.planOf(ctx, devices.ListQuery{Select: not, Sort: devices.SortID})
		if err != nil || rest.source == nil || !rest.exact || len(rest.conditions) > 0 {
			return nil, err
		}
		if n, err := s.size(ctx, rest.source, all/2+1); err != nil || 2*n > all {
			return nil, err
		}
		return rest, nil
	case !ok || p.source == nil || t.Field != selector.FieldState && t.Field != selector.FieldLabel:
		return nil, nil
	}
	if these, err := s.size(ctx, p.source, all/2+1); err != nil || 2*these <= all {
		return nil, err
	}
	if t.Field == selector.FieldState {
		other := map[string]string{database.StateOnline: database.StateOffline, database.StateOffline: database.StateOnline}[p.source.values[0]]
		return s.planOf(ctx, devices.ListQuery{Select: selector.In(selector.FieldState, other), Sort: devices.SortID})
	}
	if !s.db.Postgres() { // it merges the two indexes
		return &plan{query: p.query, now: p.now, exact: true, source: &source{table: "devices", arms: []arm{{where: "TRUE"}}, without: p.source}}, nil
	}
	return &plan{query: p.query, now: p.now, exact: true, conditions: []condition{labelCondition(true, &not.Terms()[0])}}, nil
}

// group adds up the devices of a plan that SQL can evaluate.
func (s *Records) group(ctx context.Context, p *plan, t sums) (err error) {
	if p.source != nil && p.source.without == nil {
		if p.size, err = s.size(ctx, p.source, maxLookedUp+1); err != nil {
			return err
		}
	}
	if s.db.Postgres() {
		return s.groupPostgres(ctx, p, t)
	}
	return s.groupSQLite(ctx, p, t)
}

func (s *Records) groupPostgres(ctx context.Context, p *plan, t sums) error {
	tx, err := s.db.Read.BeginTx(ctx, &sql.TxOptions{ReadOnly: true})
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // read only
	// One of the tables is hashed; compiling the query takes longer than it saves; and Postgres
	// underestimates the devices of a label: too few to read them in parallel.
	if _, err := tx.ExecContext(ctx, `SELECT set_config('work_mem', '64MB', TRUE), set_config('jit', 'off', TRUE),
 set_config('parallel_setup_cost', '0', TRUE), set_config('parallel_tuple_cost', '0', TRUE)`); err != nil {
		return err
	}
	var q query
	p.addGroup(&q, true, strings.Join(countColumns, ", ")+", count(*)", arm{where: "TRUE"})
	q.add(" GROUP BY 1, 2, 3, 4, 5, 6, 7, 8")
	_, err = database.Collect(ctx, tx, func(scan func(...any) error) (_ struct{}, err error) {
		var online, revoked bool
		var reason, transport, node, mcp, board, firmware string
		var n int64
		err = scan(&online, &revoked, &reason, &transport, &node, &mcp, &board, &firmware, &n)
		t.group(online, revoked, reason, transport, node, mcp, board, firmware, n)
		return struct{}{}, err
	}, q.text.String(), q.args...)
	return err
}

// separator is between the columns that are counted together. Only a board could
// contain it, and would lose its end to the firmware.
const separator = "\x1f"

// groupSQLite counts two halves at the same time: SQLite itself uses one core.
func (s *Records) groupSQLite(ctx context.Context, p *plan, t sums) error {
	parts := []arm{{where: "TRUE"}}
	switch table := p.scanned(); {
	case table != "":
		middle, err := s.number(ctx, "SELECT (min(rowid) + max(rowid)) / 2 FROM "+table, nil)
		if err != nil {
			return err
		}
		rowid := map[string]string{"devices": "d.rowid", "presence": "p.rowid"}[table]
		parts = []arm{{rowid + " <= ?", []any{middle}}, {rowid + " > ?", []any{middle}}}
	case p.size > maxLookedUp || p.source.without != nil:
		var middle string
		err := s.db.Read.QueryRowContext(ctx, "SELECT device FROM devices ORDER BY device LIMIT 1 OFFSET (SELECT sum(n) / 2 FROM fleet_counts WHERE dimension = $1)", database.CountState).Scan(&middle)
		switch {
		case err == nil:
			parts = []arm{{"device <= ?", []any{middle}}, {"device > ?", []any{middle}}}
		case !errors.Is(err, sql.ErrNoRows):
			return err
		}
	}
	var wg sync.WaitGroup
	errs := make([]error, len(parts))
	texts := make([]sql.NullString, len(parts))
	for i, part := range parts {
		wg.Go(func() {
			var q query
			p.addGroup(&q, false, tallyFunction+"("+strings.Join(countColumns, " || char(31) || ")+")", part)
			errs[i] = s.db.Read.QueryRowContext(ctx, q.text.String(), q.args...).Scan(&texts[i])
		})
	}
	wg.Wait()
	for i, text := range texts {
		if errs[i] != nil {
			return errs[i]
		}
		var counts tallied
		if text.String == "" { // no rows
			continue
		}
		if err := json.Unmarshal([]byte(text.String), &counts); err != nil {
			return err
		}
		for key, n := range counts {
			if v := strings.SplitN(key, separator, len(countColumns)); len(v) == len(countColumns) {
				t.group(v[0] == "1", v[1] == "1", v[2], v[3], v[4], v[5], v[6], v[7], n)
			}
		}
	}
	return nil
}

// scanned is the table that is read as a whole; empty: none.
func (p *plan) scanned() string {
	switch {
	case p.source == nil:
		return "devices"
	case p.size <= maxLookedUp || p.source.table == "device_labels" || p.source.without != nil:
		return ""
	}
	return p.source.table
}

func (p *plan) addGroup(q *query, postgres bool, columns string, part arm) {
	q.add("SELECT " + columns + " FROM ")
	switch table := p.scanned(); {
	case table == "" && (!postgres || p.size <= maxLookedUp):
		q.add("(")
		p.addSource(q, postgres, part.where, part.args, "")
		q.add(") i" + lookUp(postgres, "devices", "d", "i.device") + lookUp(postgres, "presence", "p", "i.device"))
	case table == "":
		q.add("(")
		p.addSource(q, postgres, "TRUE", nil, "")
		q.add(") i JOIN devices d ON d.device = i.device JOIN presence p ON p.device = i.device")
	case postgres:
		q.add("devices d JOIN presence p ON p.device = d.device")
	case table == "presence":
		q.add("presence p NOT INDEXED CROSS JOIN devices d ON d.device = p.device")
	default:
		q.add("devices d NOT INDEXED CROSS JOIN presence p ON p.device = d.device")
	}
	if p.scanned() == "" {
		q.add(" WHERE TRUE")
	} else {
		q.add(" WHERE "+part.where, part.args...)
	}
	if table := p.scanned(); table != "" && p.source != nil {
		alias := map[string]string{"devices": "d.", "presence": "p."}[table]
		for i, a := range p.source.arms {
			operator := " OR "
			if i == 0 {
				operator = " AND ("
			}
			q.add(operator+"("+qualify(a.where, alias)+")", a.args...)
		}
		q.add(")")
	}
	for _, c := range p.conditions {
		text := c.text
		if c.set != "" && (postgres || p.scanned() != "") {
			text = c.set
		}
		q.add(" AND "+strings.ReplaceAll(text, "w.device", "d.device"), c.args...)
	}
}

// qualify puts an alias before the columns of an arm.
func qualify(where, alias string) string {
	words := strings.Fields(where)
	for i, word := range words {
		switch word {
		case "NOT", "AND", "COLLATE", `"binary"`, "=", "?", "<>", "''":
		default:
			words[i] = alias + word
		}
	}
	return strings.Join(words, " ")
}

// Each calls f for every device that a query selects, in order of ids after one;
// its order and its page have no meaning. f may take its time. It ends with the
// first error of f.
func (s *Records) Each(ctx context.Context, q devices.ListQuery, after devices.ID, f func(devices.Row) error) error {
	if err := s.host.Usable(); err != nil {
		return err
	}
	q.Sort = devices.SortID
	p, err := s.planOf(ctx, q)
	if err != nil {
		return s.host.UseError(ctx, "reading devices", err)
	}
	if p.none {
		return nil
	}
	var stopped error
	err = s.each(ctx, p, after, func(row devices.Row) error { stopped = f(row); return stopped })
	if stopped != nil {
		return stopped
	}
	if err != nil {
		return s.host.UseError(ctx, "reading devices", err)
	}
	return nil
}

func (s *Records) each(ctx context.Context, p *plan, after devices.ID, f func(devices.Row) error) error {
	for at := (cursor{Sort: devices.SortID, ID: after}); ; {
		w, err := s.window(ctx, p, at, streamWindow, streamWindow)
		if err != nil {
			return err
		}
		for _, row := range w.rows {
			if !row.selected {
				continue
			}
			if err := f(row.Row); err != nil {
				return err
			}
		}
		if w.end {
			return nil
		}
		at = w.last
	}
}

// CatalogsOf counts, by their tool list, the devices that a selector selects which
// uses device and labels alone; any other list is left out.
func (s *Records) CatalogsOf(ctx context.Context, sel selector.Selector) ([]devices.CatalogCount, error) {
	ctx, cancel, err := s.host.BeginRead(ctx)
	if err != nil {
		return nil, err
	}
	defer cancel()
	scan := func(scan func(...any) error) (c devices.CatalogCount, err error) {
		var hash string
		if err = scan(&hash, &c.N); err == nil {
			c.Catalog, err = devices.ParseHash(hash)
		}
		return c, err
	}
	var q query
	if sel.IsZero() {
		q.add("SELECT value, CAST(sum(n) AS BIGINT) FROM fleet_counts WHERE dimension = ? GROUP BY value HAVING sum(n) > 0", database.CountCatalog)
	} else {
		p, err := s.planOf(ctx, devices.ListQuery{Select: sel})
		switch {
		case err != nil:
			return nil, s.host.UseError(ctx, "counting tool lists", err)
		case p.none:
			return nil, nil
		}
		q.add("SELECT c.catalog, count(*) FROM (")
		p.addSource(&q, s.db.Postgres(), "TRUE", nil, "")
		q.add(") w")
		q.add(lookUp(s.db.Postgres(), "presence", "c", "w.device"))
		p.addConditions(&q, s, " WHERE ")
		q.add(" GROUP BY c.catalog HAVING c.catalog <> ''")
	}
	counts, err := database.Collect(ctx, s.db.Read, scan, q.text.String(), q.args...)
	if err != nil {
		return nil, s.host.UseError(ctx, "counting tool lists", err)
	}
	return counts, nil
}
