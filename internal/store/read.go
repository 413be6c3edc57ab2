package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
)

const (
	// readTimeout bounds a read where its caller does not.
	readTimeout = 5 * time.Second
	// MaxPage is the most rows of one List: one more than an API page, which
	// tells whether another follows.
	MaxPage = 1001
)

// rowColumns are a device with its presence, in the order of scanRow.
const rowColumns = `d.device, d.client_id, d.pending_client_id, d.admission, d.name, d.labels, d.preferred_transport,
 d.board, d.firmware, d.elf_sha256, d.chip, d.language, d.serial, d.activate_v2, d.first_seen, d.checked_at, d.edited_at,
 d.client_at, d.name_at, d.labels_at, d.transport_at,
 COALESCE(p.epoch, 0), COALESCE(p.seq, 0), COALESCE(p.online, FALSE), COALESCE(p.node, ''), COALESCE(p.session, ''),
 COALESCE(p.client_id, ''), COALESCE(p.transport, ''), COALESCE(p.reason, ''), COALESCE(p.connected_at, 0),
 COALESCE(p.last_seen, 0), COALESCE(p.mcp_state, ''), COALESCE(p.mcp_error, ''), COALESCE(p.catalog, ''),
 COALESCE(p.catalog_partial, FALSE), COALESCE(p.tool_count, 0), COALESCE(p.generation, 0)
 FROM devices d LEFT JOIN presence p ON p.device = d.device`

// scanRow reads rowColumns.
func scanRow(scan func(...any) error) (devices.Row, error) {
	var row devices.Row
	var labels, catalog string
	var firstSeen, checkedAt, editedAt, connectedAt, lastSeen int64
	d, p := &row.Device, &row.Presence
	if err := scan(&d.ID, &d.ClientID, &d.PendingID, &d.Admission, &d.Name, &labels, &d.Prefer,
		&d.Board, &d.Firmware, &d.ELF, &d.Chip, &d.Language, &d.Serial, &d.ActivateV2, &firstSeen, &checkedAt, &editedAt,
		&d.Decided.Client, &d.Decided.Name, &d.Decided.Labels, &d.Decided.Prefer,
		&p.Epoch, &p.Seq, &p.Online, &p.Node, &p.Session, &p.ClientID, &p.Transport, &p.Reason, &connectedAt,
		&lastSeen, &p.MCP, &p.MCPError, &catalog, &p.Partial, &p.Tools, &p.Generation); err != nil {
		return devices.Row{}, err
	}
	d.Labels = decodeLabels(labels)
	d.FirstSeen, d.CheckedAt, d.EditedAt = instant(firstSeen), instant(checkedAt), instant(editedAt)
	if p.Epoch == 0 {
		row.Presence = devices.Presence{}
		return row, nil
	}
	p.Device = d.ID
	p.ConnectedAt, p.LastSeen = instant(connectedAt), instant(lastSeen)
	var err error
	p.Catalog, err = devices.ParseHash(catalog)
	return row, err
}

// reading starts a read: it fails at once while the database is away.
func (s *Store) reading(ctx context.Context) (context.Context, context.CancelFunc, error) {
	if err := s.health.Load().err; err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	return ctx, cancel, nil
}

// useError wraps an error met while using the database, and tells the watcher
// of it where it should look.
func (s *Store) useError(ctx context.Context, doing string, err error) error {
	switch {
	case errors.Is(err, ErrConfig):
		return err
	case errors.Is(ctx.Err(), context.Canceled):
		return fmt.Errorf("%s: %w", doing, ctx.Err()) // the caller went away, not the database
	case ctx.Err() != nil:
		s.raiseDoubt() // too slow for this caller; that alone does not make it unusable
		return fmt.Errorf("%w: %s: %w", devices.ErrDatabase, doing, ctx.Err())
	case faultOf(err) == faultLost:
		s.suspect(err)
	}
	return fmt.Errorf("%w: %s: %w", devices.ErrDatabase, doing, err)
}

// Find returns one device.
func (s *Store) Find(ctx context.Context, id devices.ID) (devices.Row, error) {
	ctx, cancel, err := s.reading(ctx)
	if err != nil {
		return devices.Row{}, err
	}
	defer cancel()
	row, err := scanRow(s.backend.read.QueryRowContext(ctx, "SELECT "+rowColumns+" WHERE d.device = $1", clean(string(id))).Scan)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return devices.Row{}, fmt.Errorf("device %s: %w", id, devices.ErrNotFound)
	case err != nil:
		return devices.Row{}, s.useError(ctx, "reading a device", err)
	}
	return row, nil
}

// List returns one page in byte order of the ids. q.Limit outside 1 to MaxPage
// counts as MaxPage. `pending` selects devices that wait for approval and those
// with a client id that does; `online` and `offline` look at the presence row
// of admitted or revoked devices.
func (s *Store) List(ctx context.Context, q devices.Query) ([]devices.Row, error) {
	limit := q.Limit
	if limit < 1 || limit > MaxPage {
		limit = MaxPage
	}
	var rows []devices.Row
	for {
		q.Limit = limit - len(rows)
		page, err := s.page(ctx, q)
		if err != nil {
			return nil, err
		}
		for _, row := range page {
			if (q.Label == "" || hasLabel(row.Device.Labels, q.Label)) && q.Selector.Matches(string(row.Device.ID), row.Device.Labels) {
				rows = append(rows, row)
			}
		}
		if len(page) < q.Limit || len(rows) == limit {
			return rows, nil
		}
		q.After = page[len(page)-1].Device.ID
	}
}

// page is List with a filter for labels that may let too many through.
func (s *Store) page(ctx context.Context, q devices.Query) ([]devices.Row, error) {
	text, args, err := listQuery(q)
	if err != nil {
		return nil, err
	}
	ctx, cancel, err := s.reading(ctx)
	if err != nil {
		return nil, err
	}
	defer cancel()
	rows, err := collect(ctx, s.backend.read, scanRow, text, args...)
	if err != nil {
		return nil, s.useError(ctx, "listing devices", err)
	}
	return rows, nil
}

// listQuery is the SELECT of one page. Text is searched with replace(), which
// unlike LIKE has no wildcards and minds case on both databases.
func listQuery(q devices.Query) (text string, args []any, err error) {
	var where []string
	add := func(condition, value string) {
		args = append(args, clean(value))
		where = append(where, strings.ReplaceAll(condition, "?", "$"+strconv.Itoa(len(args))))
	}
	add("d.device > ?", string(q.After))
	switch q.State {
	case "":
	case "online":
		where = append(where, "COALESCE(p.online, FALSE) AND d.admission <> 'pending'")
	case "offline":
		where = append(where, "NOT COALESCE(p.online, FALSE) AND d.admission <> 'pending'")
	case "pending":
		where = append(where, "(d.admission = 'pending' OR d.pending_client_id <> '')")
	default:
		return "", nil, fmt.Errorf("state %q cannot be listed: use online, offline or pending", q.State)
	}
	for _, f := range []struct{ condition, value string }{
		{"p.transport = ?", q.Transport},
		{"d.board = ?", q.Board},
		{"d.firmware = ?", q.Firmware},
		{"(replace(d.device, ?, '') <> d.device OR replace(d.name_folded, ?, '') <> d.name_folded" +
			" OR replace(lower(d.board), ?, '') <> lower(d.board))", strings.ToLower(q.Text)},
	} {
		if f.value != "" {
			add(f.condition, f.value)
		}
	}
	if q.Label != "" {
		add("replace(d.labels, ?, '') <> d.labels", labelPattern(q.Label))
	}
	for _, name := range slices.Sorted(maps.Keys(q.Selector)) {
		if name == access.SelectDevice {
			add("d.device = ?", q.Selector[name])
		} else {
			add("replace(d.labels, ?, '') <> d.labels", labelPattern(name+"="+q.Selector[name]))
		}
	}
	args = append(args, int64(q.Limit))
	return "SELECT " + rowColumns + " WHERE " + strings.Join(where, " AND ") + " ORDER BY d.device LIMIT $" + strconv.Itoa(len(args)), args, nil
}

// collect runs a query and reads all its rows.
func collect[T any](ctx context.Context, db *sql.DB, scan func(func(...any) error) (T, error), text string, args ...any) ([]T, error) {
	rows, err := db.QueryContext(ctx, text, args...)
	if err != nil {
		return nil, err
	}
	var out []T
	for rows.Next() {
		row, err := scan(rows.Scan)
		if err != nil {
			return nil, errors.Join(err, rows.Close())
		}
		out = append(out, row)
	}
	return out, rows.Err()
}

// LoadDevices calls f for every row in id order, page by page: f may take its
// time and may use the store.
func (s *Store) LoadDevices(ctx context.Context, f func(devices.Row) error) error {
	q := devices.Query{Limit: MaxPage}
	for {
		page, err := s.page(ctx, q)
		if err != nil {
			return err
		}
		for _, row := range page {
			if err := f(row); err != nil {
				return err
			}
		}
		if len(page) < q.Limit {
			return nil
		}
		q.After = page[len(page)-1].Device.ID
	}
}

// LoadExceptions returns all exceptions in id order.
func (s *Store) LoadExceptions(ctx context.Context) ([]devices.Exception, error) {
	ctx, cancel, err := s.reading(ctx)
	if err != nil {
		return nil, err
	}
	defer cancel()
	out, err := collect(ctx, s.backend.read, func(scan func(...any) error) (e devices.Exception, err error) {
		var changed, until int64
		err = scan(&e.Device, &e.Generation, &e.Revoked, &e.Reason, &changed, &e.Previous, &until)
		e.ChangedAt, e.PreviousUntil = instant(changed), instant(until)
		return e, err
	}, `SELECT device, generation, revoked, reason, changed_at, previous, previous_until FROM credential_exceptions ORDER BY device`)
	if err != nil {
		return nil, s.useError(ctx, "reading credential exceptions", err)
	}
	return out, nil
}

// Catalog returns one stored list, byte for byte as it was saved.
func (s *Store) Catalog(ctx context.Context, h devices.Hash) (devices.CatalogText, error) {
	ctx, cancel, err := s.reading(ctx)
	if err != nil {
		return devices.CatalogText{}, err
	}
	defer cancel()
	c := devices.CatalogText{Hash: h}
	var text, encoding string
	var firstSeen int64
	err = s.backend.read.QueryRowContext(ctx, `SELECT tools, encoding, tool_count, first_seen FROM catalogs WHERE sha256 = $1`, h.String()).
		Scan(&text, &encoding, &c.Count, &firstSeen)
	if errors.Is(err, sql.ErrNoRows) {
		return devices.CatalogText{}, fmt.Errorf("catalog %s: %w", h, devices.ErrNotFound)
	}
	if err == nil {
		c.FirstSeen = instant(firstSeen)
		c.Tools, err = decodeTools(text, encoding)
	}
	if err != nil {
		return devices.CatalogText{}, s.useError(ctx, "reading a catalog", err)
	}
	return c, nil
}

// History returns entries of one device, newest first. limit outside 1 to
// MaxPage counts as MaxPage.
func (s *Store) History(ctx context.Context, id devices.ID, epoch devices.Epoch, seq int64, limit int) ([]devices.HistoryEntry, error) {
	ctx, cancel, err := s.reading(ctx)
	if err != nil {
		return nil, err
	}
	defer cancel()
	if epoch == 0 && seq == 0 {
		epoch, seq = math.MaxInt64, math.MaxInt64
	}
	if limit < 1 || limit > MaxPage {
		limit = MaxPage
	}
	out, err := collect(ctx, s.backend.read, func(scan func(...any) error) (devices.HistoryEntry, error) {
		e := devices.HistoryEntry{Device: id}
		var catalog string
		var at int64
		if err := scan(&e.Epoch, &e.Seq, &catalog, &e.Firmware, &e.ELF, &e.Partial, &at); err != nil {
			return e, err
		}
		e.At = instant(at)
		var err error
		e.Catalog, err = devices.ParseHash(catalog)
		return e, err
	}, `SELECT epoch, seq, catalog, firmware, elf_sha256, partial, at FROM catalog_history
 WHERE device = $1 AND (epoch, seq) < ($2, $3) ORDER BY epoch DESC, seq DESC LIMIT $4`, clean(string(id)), int64(epoch), seq, int64(limit))
	if err != nil {
		return nil, s.useError(ctx, "reading the catalog history", err)
	}
	return out, nil
}
