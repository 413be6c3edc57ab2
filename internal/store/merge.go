package store

import (
	"context"
	"database/sql"
	"maps"
	"slices"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/selector"
	"fleetd/internal/store/database"
)

// storedFacts is the row of a device in the table devices before facts are written.
type storedFacts struct {
	devices.Facts
	checkedAt   int64
	imageHash   string
	imageChecks int64
}

// factRow is a check as it is written to devices.
type factRow struct {
	devices.Check
	imageHash   string
	imageChecks int64
}

// storedPresence is a row of presence before it is overwritten.
type storedPresence struct {
	devices.Presence
	catalog  string
	lastSeen int64
}

func (p *storedPresence) counted() database.PresenceCounted {
	return database.PresenceCounted{Online: p.Online, Reason: p.Reason, Transport: string(p.Transport), Node: p.Node, MCP: string(p.MCP), Catalog: p.catalog}
}

func (p *presenceRow) counted() database.PresenceCounted {
	return database.PresenceCounted{Online: p.Online, Reason: p.Reason, Transport: string(p.Transport), Node: p.Node, MCP: string(p.MCP), Catalog: p.catalog}
}

// mergeResult is what a group changes in the tables devices and presence.
type mergeResult struct {
	facts, image            []factRow
	session, presence, seen []presenceRow
	counts                  database.Deltas
	newer                   []devices.Presence // stored rows that prevented a row with a device online
	stale, unknown          int                // number of presence rows that change nothing
	images                  []imageRow
	changes                 []devices.ImageChange
}

// merge reads and locks the rows of a group, and decides what to change. Rows are locked in the
// order of all transactions: devices, then presence, each by id.
func (w *writer) merge(ctx context.Context, tx *sql.Tx, g *group) (m mergeResult, err error) {
	m.counts = database.Deltas{}
	checked := make(map[devices.ID]int64, len(g.facts)) // applied checks
	if len(g.facts) > 0 {
		stored, now, err := lockFacts(ctx, tx, w.store.backend.Postgres(), g.facts)
		if err != nil {
			return m, err
		}
		now, ahead := w.store.compareClocks(now)
		var news []imageNews
		for i := range g.facts {
			f := g.facts[i]
			f.Facts = f.Map(database.Clean)
			f.Details = database.Clean(f.Details)
			f.CheckedAt = f.CheckedAt.Add(-ahead)
			old, there := stored[f.Device]
			at := clock.Micros(f.CheckedAt)
			late := at <= old.checkedAt && old.checkedAt <= now // a later time is of a wrong clock
			if there && late && f.ELF != "" && old.ELF == "" && f.Firmware == old.Firmware {
				at, late = old.checkedAt, false // another node has written first what `initialize` said, which is less
				f.CheckedAt = clock.Instant(at)
			}
			if !there || late {
				if c, ok := g.changes[f.Device]; ok && at == old.checkedAt { // its commit had no answer
					m.changes = append(m.changes, c)
				}
				continue
			}
			row := factRow{f, old.imageHash, old.imageChecks}
			isNews := row.noteImage()
			row.Facts = f.Over(old.Facts)
			list := &m.facts
			if row.Board != old.Board || row.Firmware != old.Firmware || row.imageHash != old.imageHash || row.imageChecks != old.imageChecks {
				list = &m.image
				m.counts.Facts(old.Board, old.Firmware, -1)
				m.counts.Facts(row.Board, row.Firmware, 1)
			}
			if isNews {
				news = append(news, imageNews{f, old.ELF == "" && old.imageHash == "", list, len(*list)})
			}
			*list = append(*list, row)
			checked[f.Device] = at
		}
		if err := m.mergeImages(ctx, tx, w.store.backend.Postgres(), news); err != nil {
			return m, err
		}
	}
	if len(g.presence)+len(checked) == 0 {
		return m, nil
	}
	stored, err := lockPresence(ctx, tx, w.store.backend.Postgres(), g.presence, checked)
	if err != nil {
		return m, err
	}
	for i := range g.presence {
		p := &g.presence[i]
		if old, there := stored[p.Device]; !there {
			m.unknown++
		} else if before(&old.Presence, p) {
			m.apply(old, p, checked[p.Device])
			delete(checked, p.Device)
		} else {
			m.stale++
			// A row that is saved again after a commit with a lost answer finds itself; an ended
			// session is replaced by anything.
			if p.Online && (before(p, &old.Presence) || !old.Online || old.Session != database.Clean(p.Session)) {
				m.newer = append(m.newer, old.Presence)
			}
		}
	}
	for id, at := range checked { // offline, but seen again
		if old, there := stored[id]; there && !old.Online && old.lastSeen < at {
			m.seen = append(m.seen, presenceRow{Presence: devices.Presence{Device: id}, lastSeen: at})
		}
	}
	return m, nil
}

// apply applies p to the stored row; checked is the time of an OTA check in the same group.
func (m *mergeResult) apply(old storedPresence, p *devices.Presence, checked int64) {
	row := presenceRow{Presence: cleanPresence(*p), catalog: p.Catalog.String(), lastSeen: clock.Micros(p.LastSeen)}
	if p.KeepCatalog {
		row.catalog, row.Partial, row.Tools = old.catalog, old.Partial, old.Tools
	}
	m.counts.Presence(old.counted(), -1)
	m.counts.Presence(row.counted(), 1)
	if old.Online && row.Online && old.Node == row.Node && old.Transport == row.Transport && old.Reason == row.Reason && old.catalog == row.catalog {
		m.session = append(m.session, row)
		return
	}
	if !row.Online {
		row.offlineSince = row.lastSeen
		row.lastSeen = max(row.lastSeen, checked)
	}
	m.presence = append(m.presence, row)
}

// versionKey returns the sort key of a version; empty if the firmware cannot parse it.
func versionKey(version string) string {
	key, _ := selector.VersionKey(version)
	return key
}

func cleanPresence(p devices.Presence) devices.Presence {
	p.Transport, p.MCP = devices.Transport(database.Clean(string(p.Transport))), devices.MCPState(database.Clean(string(p.MCP)))
	for _, text := range []*string{&p.Node, &p.Session, &p.ClientID, &p.Reason, &p.MCPError} {
		*text = database.Clean(*text)
	}
	return p
}

// locking returns a query that locks rows in order of their devices.
func locking(postgres bool, columns string, ids []string) (text string, arg any) {
	condition, arg := database.IDSet(postgres, "device", "$1", ids)
	text = columns + " WHERE " + condition
	if postgres {
		text += " ORDER BY device FOR UPDATE"
	}
	return text, arg
}

// clockSlack is how far the clock of a node may be off the database's without a correction: what is measured has the time
// of a query in it, and a device boots between two checks.
const clockSlack = time.Second

// compareClocks returns the database's time and how far the node's clock is ahead of it. measured is the database's time as
// measured now, 0 if the database has no clock of its own.
func (s *Store) compareClocks(measured int64) (now int64, ahead time.Duration) {
	own := clock.Micros(s.now())
	if measured == 0 {
		return own, 0
	}
	if ahead = time.Duration(own-measured) * time.Microsecond; ahead.Abs() < clockSlack {
		ahead = 0
	}
	return measured, ahead
}

// lockFacts returns the stored rows, and the time of the database in microseconds, 0 on SQLite.
func lockFacts(ctx context.Context, tx *sql.Tx, postgres bool, facts []devices.Check) (stored map[devices.ID]storedFacts, now int64, err error) {
	ids := make([]string, len(facts))
	for i := range facts {
		ids[i] = string(facts[i].Device)
	}
	slices.Sort(ids)
	clock := "0"
	if postgres {
		clock = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
	}
	text, arg := locking(postgres, "SELECT device, board, firmware, elf_sha256, chip, language, serial, activate_v2, checked_at, image_hash, image_checks, "+clock+" FROM devices", ids)
	stored = make(map[devices.ID]storedFacts, len(ids))
	_, err = database.Collect(ctx, tx, func(scan func(...any) error) (_ struct{}, err error) {
		var id devices.ID
		var f storedFacts
		var at int64
		err = scan(&id, &f.Board, &f.Firmware, &f.ELF, &f.Chip, &f.Language, &f.Serial, &f.ActivateV2, &f.checkedAt, &f.imageHash, &f.imageChecks, &at)
		stored[id], now = f, max(now, at)
		return struct{}{}, err
	}, text, arg)
	return stored, now, err
}

func lockPresence(ctx context.Context, tx *sql.Tx, postgres bool, rows []devices.Presence, checked map[devices.ID]int64) (map[devices.ID]storedPresence, error) {
	set := make(map[string]struct{}, len(rows)+len(checked))
	for i := range rows {
		set[string(rows[i].Device)] = struct{}{}
	}
	for id := range checked {
		set[string(id)] = struct{}{}
	}
	text, arg := locking(postgres, "SELECT device, epoch, seq, online, node, session, transport, reason, last_seen, mcp_state, catalog, catalog_partial, tool_count FROM presence",
		slices.Sorted(maps.Keys(set)))
	out := make(map[devices.ID]storedPresence, len(set))
	_, err := database.Collect(ctx, tx, func(scan func(...any) error) (_ struct{}, err error) {
		var p storedPresence
		err = scan(&p.Device, &p.Epoch, &p.Seq, &p.Online, &p.Node, &p.Session, &p.Transport, &p.Reason, &p.lastSeen, &p.MCP, &p.catalog, &p.Partial, &p.Tools)
		out[p.Device] = p
		return struct{}{}, err
	}, text, arg)
	return out, err
}

// before orders the pairs (epoch, seq).
func before(a, b *devices.Presence) bool {
	return a.Epoch < b.Epoch || a.Epoch == b.Epoch && a.Seq < b.Seq
}
