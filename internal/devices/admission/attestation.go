package admission

import (
	"context"
	"crypto/subtle"
	"errors"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"fleetd/internal/audit"
	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
	"fleetd/internal/jsonspan"
)

// disputeLife is how long a device whose proof was refused shows as contested:
// as long as it has a code.
const disputeLife = CodeLife

// TakeChallenge uses up the challenge that the client was given, if it is this
// one and still good: each is good for one proof. back makes it good again, for
// a proof that could not be judged.
func (a *Admission) TakeChallenge(id devices.ID, clientID, challenge string) (back func(), ok bool) {
	p := a.pending
	p.mu.Lock()
	defer p.mu.Unlock()
	p.expireLocked(id, time.Now())
	for i := range p.byDevice[id] {
		w := &p.byDevice[id][i]
		if w.clientID != clientID || w.spent || subtle.ConstantTimeCompare([]byte(w.challenge), []byte(challenge)) != 1 {
			continue
		}
		w.spent = true
		return func() { p.unspend(id, clientID, challenge) }, true
	}
	return nil, false
}

func (p *pendings) unspend(id devices.ID, clientID, challenge string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.byDevice[id] {
		if w := &p.byDevice[id][i]; w.clientID == clientID && w.challenge == challenge {
			w.spent = false
		}
	}
}

// Reasons why a right proof admits nobody. The lists of attest add to them.
const (
	RefusedUnknown = "unknown"   // the device does not wait here
	RefusedRevoked = "revoked"   // an operator revoked it, and has to approve it
	RefusedForeign = "not_bound" // it would replace a member that never named this number
	// RefusedUnavailable: the database did not take it; the device tries again.
	RefusedUnavailable = "unavailable"
)

// AdmitProven admits the client that waits under the id, as Approve does: its
// hardware has proven itself under this serial number. bound says that the
// number was bound to the device before. Who would replace the client of a
// member needs that, or a member that named the number itself: else whoever has
// any listed chip could take any device. What an operator revoked stays so
// until an operator approves it. refused is why, empty if it is admitted.
func (a *Admission) AdmitProven(ctx context.Context, id devices.ID, clientID, serial string, bound bool) (refused string) {
	waits := a.pending.waits(id, time.Now())
	err := a.admit(ctx, "chip "+serial, id, clientID, func(m *devices.Member) error {
		if reason := refuses(m, waits, clientID, serial, bound); reason != "" {
			return refusal(reason)
		}
		return nil
	})
	var no refusal
	switch {
	case errors.As(err, &no):
		return string(no)
	case err != nil:
		a.log.Warn("a device that has proven itself is not admitted yet; it tries again", "device", id, "error", err)
		return RefusedUnavailable
	}
	a.ports.Record(audit.Entry{At: time.Now(), Kind: audit.KindCredential, Action: "prove", Device: string(id), Outcome: audit.OutcomeOK, Detail: devices.Clip("serial " + serial + ", client " + clientID)})
	return ""
}

// refusal is a reason as an error.
type refusal string

func (r refusal) Error() string { return string(r) }

// MayProve is what AdmitProven would refuse a number for that is not bound yet,
// so that it is not bound in vain.
func (a *Admission) MayProve(ctx context.Context, id devices.ID, clientID, serial string) (refused string) {
	m := devices.Member{ID: id}
	if a.registry.Standing(id, clientID).Known {
		ctx, cancel := context.WithTimeout(ctx, session.LookupTimeout)
		defer cancel()
		row, err := a.ports.Records.Find(ctx, id)
		if err != nil {
			return RefusedUnavailable
		}
		m = row.Device.Member()
	}
	return refuses(&m, a.pending.waits(id, time.Now()), clientID, serial, false)
}

func refuses(m *devices.Member, waits bool, clientID, serial string, bound bool) (reason string) {
	switch {
	case !m.Known() && !waits:
		return RefusedUnknown
	case m.Admission == devices.AdmissionRevoked:
		return RefusedRevoked
	case m.Known() && m.ClientID != "" && m.ClientID != clientID && !bound && m.Serial != serial:
		return RefusedForeign
	}
	return ""
}

// Dispute reports that somebody's proof for the id was refused. The id shows as
// contested for a while; nothing else changes.
func (a *Admission) Dispute(id devices.ID, clientID, serial string, reason devices.Dispute) {
	now := time.Now()
	a.hub.Stats().Contested.Add(reason, 1)
	a.dispute(id, now)
	a.ports.Directory.Tell(devices.News{Disputed: &devices.Disputed{Device: id, Reason: reason}})
	a.log.Warn("device id is contested", "device", id, "client", clientID, "serial", serial, "reason", string(reason))
	a.ports.Record(audit.Entry{At: now, Kind: audit.KindRefusal, Action: "prove", Device: string(id), Outcome: string(reason), Detail: devices.Clip("serial " + serial + ", client " + clientID)})
	fields := jsonspan.AppendString([]byte(`"client_id":`), clientID)
	fields = jsonspan.AppendString(append(fields, `,"reason":`...), string(reason))
	fields = jsonspan.AppendString(append(fields, `,"serial":`...), serial)
	a.ports.Publisher.Publish(devices.Event{Kind: devices.EventContested, Device: id, Time: now, Fields: fields,
		MsgID: id.Token() + "-contested-" + string(reason) + "-" + strconv.FormatInt(now.Unix()/int64(devices.FightPause/time.Second), 10)})
}

func (a *Admission) dispute(id devices.ID, now time.Time) { a.disputes.add(id, now) }

// maxDisputes bounds the ids that are remembered as disputed; the oldest makes
// room.
const maxDisputes = 10_000

// disputes remembers the ids for which a proof was refused lately.
type disputes struct {
	mu sync.Mutex
	at map[devices.ID]time.Time
}

func (d *disputes) add(id devices.ID, now time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.at == nil {
		d.at = map[devices.ID]time.Time{}
	}
	if _, again := d.at[id]; !again && len(d.at) >= maxDisputes {
		oldest := id
		for other, at := range d.at {
			if oldest == id || at.Before(d.at[oldest]) {
				oldest = other
			}
		}
		delete(d.at, oldest)
	}
	d.at[id] = now
}

// ids are those that are disputed now.
func (d *disputes) ids(now time.Time) []devices.ID {
	d.mu.Lock()
	defer d.mu.Unlock()
	maps.DeleteFunc(d.at, func(_ devices.ID, at time.Time) bool { return !isRecent(at, now) })
	return slices.Collect(maps.Keys(d.at))
}

func (d *disputes) has(id devices.ID, now time.Time) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	at, ok := d.at[id]
	return ok && isRecent(at, now)
}

// isRecent is also false for a time that lies ahead: the clock was set back since.
func isRecent(at, now time.Time) bool {
	age := now.Sub(at)
	return age >= 0 && age < disputeLife
}

// IsContested tells whether clients fight for the id, or somebody's proof for it was
// refused lately.
func (a *Admission) IsContested(id devices.ID, now time.Time) bool {
	if a.disputes.has(id, now) {
		return true
	}
	return a.hub.Fought(id, now)
}

// ContestedIDs are the contested devices as this node sees them, in order.
func (a *Admission) ContestedIDs(now time.Time) []devices.ID {
	ids := append(a.disputes.ids(now), a.hub.FoughtIDs(now)...)
	slices.Sort(ids)
	return slices.Compact(ids)
}

// Contested is how many devices are contested as this node sees it.
func (a *Admission) Contested() int { return len(a.ContestedIDs(time.Now())) }
