package records

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"slices"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/store/database"
)

const (
	// MaxPage is how many rows one page has at most.
	MaxPage = 1001
)

// presenceColumns are a row of presence p, for scanPresence.
const presenceColumns = `p.epoch, p.seq, p.online, p.node, p.session, p.client_id, p.transport, p.reason, p.connected_at, p.last_seen,
 p.offline_since, p.mcp_state, p.mcp_error, p.catalog, p.catalog_partial, p.tool_count, p.generation`

// rowColumns are the columns of a device with its presence, in the order of rowScan. The ledger
// creates both rows together.
const rowColumns = `d.device, d.client_id, d.admission, d.name, d.labels, d.preferred_transport, d.revision, d.board, d.firmware,
 d.elf_sha256, d.chip, d.language, d.serial, d.activate_v2, d.first_seen, d.checked_at, ` + presenceColumns

const rowTables = " FROM devices d JOIN presence p ON p.device = d.device"

// presenceScan contains the destinations of presenceColumns.
type presenceScan struct {
	p                                   *devices.Presence
	connectedAt, lastSeen, offlineSince int64
	catalog                             string
}

func (s *presenceScan) places() []any {
	p := s.p
	return []any{&p.Epoch, &p.Seq, &p.Online, &p.Node, &p.Session, &p.ClientID, &p.Transport, &p.Reason, &s.connectedAt, &s.lastSeen,
		&s.offlineSince, &p.MCP, &p.MCPError, &s.catalog, &p.Partial, &p.Tools, &p.Generation}
}

func (s *presenceScan) finish() (err error) {
	p := s.p
	p.ConnectedAt, p.LastSeen, p.OfflineSince = clock.Instant(s.connectedAt), clock.Instant(s.lastSeen), clock.Instant(s.offlineSince)
	p.Catalog, err = devices.ParseHash(s.catalog)
	return err
}

// scanPresence reads presenceColumns, which come after other columns.
func scanPresence(p *devices.Presence, scan func(...any) error, before ...any) error {
	row := presenceScan{p: p}
	if err := scan(append(before, row.places()...)...); err != nil {
		return err
	}
	return row.finish()
}

// rowScan reads rowColumns, of one row after the other.
type rowScan struct {
	row                  devices.Row
	presence             presenceScan
	labels               string
	firstSeen, checkedAt int64
	places               []any
}

// newRowScan returns a rowScan of columns before, then of rowColumns.
func newRowScan(before ...any) *rowScan {
	s := &rowScan{}
	s.presence.p = &s.row.Presence
	d := &s.row.Device
	s.places = append(append(before, &d.ID, &d.ClientID, &d.Admission, &d.Name, &s.labels, &d.Prefer, &d.Revision, &d.Board, &d.Firmware,
		&d.ELF, &d.Chip, &d.Language, &d.Serial, &d.ActivateV2, &s.firstSeen, &s.checkedAt), s.presence.places()...)
	return s
}

// next reads the next row.
func (s *rowScan) next(scan func(...any) error) (devices.Row, error) {
	if err := scan(s.places...); err != nil {
		return devices.Row{}, err
	}
	d := &s.row.Device
	d.Labels = database.DecodeLabels(s.labels)
	d.FirstSeen, d.CheckedAt = clock.Instant(s.firstSeen), clock.Instant(s.checkedAt)
	s.row.Presence.Device = d.ID
	err := s.presence.finish()
	return s.row, err
}

// Find returns one device, or an error that wraps devices.ErrNotFound.
func (s *Records) Find(ctx context.Context, id devices.ID) (devices.Row, error) {
	ctx, cancel, err := s.host.BeginRead(ctx)
	if err != nil {
		return devices.Row{}, err
	}
	defer cancel()
	row, err := newRowScan().next(s.db.Read.QueryRowContext(ctx, "SELECT "+rowColumns+rowTables+" WHERE d.device = $1", database.Clean(string(id))).Scan)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return devices.Row{}, fmt.Errorf("device %s: %w", id, devices.ErrNotFound)
	case err != nil:
		return devices.Row{}, s.host.UseError(ctx, "reading a device", err)
	}
	return row, nil
}

// MaxRows is how many devices Rows reads with one statement.
const MaxRows = 500

// Rows returns the rows of the known ones of these devices, in order of ids.
func (s *Records) Rows(ctx context.Context, ids []devices.ID) ([]devices.Row, error) {
	names := make([]string, 0, len(ids))
	for _, id := range ids {
		if database.IsText(string(id)) {
			names = append(names, string(id))
		}
	}
	slices.Sort(names)
	names = slices.Compact(names)
	ctx, cancel, err := s.host.BeginRead(ctx)
	if err != nil {
		return nil, err
	}
	defer cancel()
	var out []devices.Row
	for chunk := range slices.Chunk(names, MaxRows) {
		rows, err := s.rows(ctx, chunk)
		if err != nil {
			return nil, s.host.UseError(ctx, "reading devices", err)
		}
		out = append(out, rows...)
	}
	return out, nil
}

// rows is Rows for sorted ids. It looks up each presence individually, so that Postgres does not scan
// the whole table.
func (s *Records) rows(ctx context.Context, ids []string) ([]devices.Row, error) {
	condition, arg := database.IDSet(s.db.Postgres(), "d.device", "$1", ids)
	tables := rowTables
	if s.db.Postgres() {
		tables = " FROM devices d" + lookUp(true, "presence", "p", "d.device")
	}
	rows, err := database.Collect(ctx, s.db.Read, newRowScan().next, "SELECT "+rowColumns+tables+" WHERE "+condition, arg)
	slices.SortFunc(rows, func(a, b devices.Row) int { return cmp.Compare(a.Device.ID, b.Device.ID) })
	return rows, err
}

// Catalog returns one stored list, byte for byte as it was saved.
func (s *Records) Catalog(ctx context.Context, h devices.Hash) (devices.CatalogText, error) {
	c, found, err := database.One(ctx, s.host, "reading a catalog", func(scan func(...any) error) (devices.CatalogText, error) {
		c := devices.CatalogText{Hash: h}
		var text, encoding string
		var firstSeen int64
		err := scan(&text, &encoding, &c.Count, &firstSeen)
		if err == nil {
			c.FirstSeen = clock.Instant(firstSeen)
			c.Tools, err = database.DecodeTools(text, encoding)
		}
		return c, err
	}, `SELECT tools, encoding, tool_count, first_seen FROM catalogs WHERE sha256 = $1`, h.String())
	if err == nil && !found {
		err = fmt.Errorf("catalog %s: %w", h, devices.ErrNotFound)
	}
	return c, err
}

// History returns entries of one device, newest first. A limit outside 1 to MaxPage is replaced by
// MaxPage.
func (s *Records) History(ctx context.Context, id devices.ID, epoch devices.Epoch, seq int64, limit int) ([]devices.HistoryEntry, error) {
	if epoch == 0 && seq == 0 {
		epoch, seq = math.MaxInt64, math.MaxInt64
	}
	if limit < 1 || limit > MaxPage {
		limit = MaxPage
	}
	return database.Read(ctx, s.host, "reading the catalog history", func(scan func(...any) error) (devices.HistoryEntry, error) {
		e := devices.HistoryEntry{Device: id}
		var catalog string
		var at int64
		if err := scan(&e.Epoch, &e.Seq, &catalog, &e.Firmware, &e.ELF, &e.Partial, &at); err != nil {
			return e, err
		}
		e.At = clock.Instant(at)
		var err error
		e.Catalog, err = devices.ParseHash(catalog)
		return e, err
	}, `SELECT epoch, seq, catalog, firmware, elf_sha256, partial, at FROM catalog_history
 WHERE device = $1 AND (epoch, seq) < ($2, $3) ORDER BY epoch DESC, seq DESC LIMIT $4`, database.Clean(string(id)), int64(epoch), seq, int64(limit))
}
