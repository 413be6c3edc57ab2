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
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
	"fleetd/internal/jsonspan"
)

// disputeLifetime is how long a device is shown as contested after a refused proof: as long
// as it has a code.
const disputeLifetime = CodeLifetime

// TakeChallenge uses up the challenge that the client received, if it matches and is unused:
// each is valid for one proof. restore makes it valid again, for a proof that could not be
// decided.
func (a *Admission) TakeChallenge(id devices.ID, clientID, challenge string) (restore func(), ok bool) {
	p := a.pending
	p.mu.Lock()
	defer p.mu.Unlock()
	p.expireLocked(id, time.Now())
	for i := range p.byDevice[id] {
		w := &p.byDevice[id][i]
		if w.clientID != clientID || w.answered || subtle.ConstantTimeCompare([]byte(w.challenge), []byte(challenge)) != 1 {
			continue
		}
		w.answered = true
		return func() { p.restoreChallenge(id, clientID, challenge) }, true
	}
	return nil, false
}

func (p *pendings) restoreChallenge(id devices.ID, clientID, challenge string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.byDevice[id] {
		if w := &p.byDevice[id][i]; w.clientID == clientID && w.challenge == challenge {
			w.answered = false
		}
	}
}

// Reasons why a valid proof admits no device. Package attest has further ones.
const (
	RefusedUnknown = "unknown"   // the device is not pending here
	RefusedRevoked = "revoked"   // an operator revoked it or refused the client, and has to approve it
	RefusedForeign = "not_bound" // it would replace a member that never reported this serial number
	// RefusedUnavailable: the database did not accept it; the device retries.
	RefusedUnavailable = "unavailable"
)

// AdmitProven admits the client that is pending, as Approve does, after its hardware has
// proven itself with this serial number. bound means that the number was bound to the device
// before. Replacing the client of a member requires that, or that the member reported the
// number itself: otherwise the owner of any listed chip could take over any device. A
// revoked device stays revoked until an operator approves it. refused is the reason, empty
// if the client is admitted.
func (a *Admission) AdmitProven(ctx context.Context, id devices.ID, clientID, serial string, bound bool) (refused string) {
	waits := a.pending.has(id, time.Now())
	err := a.admit(ctx, "chip "+serial, id, clientID, func(m *devices.Member) error {
		if reason := refusalReason(m, waits, clientID, serial, bound); reason != "" {
			return refusal(reason)
		}
		return nil
	})
	var no refusal
	switch {
	case errors.As(err, &no):
		return string(no)
	case err != nil:
		a.log.Warn("a proven device is not admitted yet; it retries", "device", id, "error", err)
		return RefusedUnavailable
	}
	a.ports.Audit.Record(audit.Entry{At: clock.Now(), Kind: audit.KindCredential, Action: "prove", Device: string(id), Outcome: audit.OutcomeOK, Detail: devices.Clip("serial " + serial + ", client " + a.registry.Client(clientID))})
	return ""
}

// refusal is a reason as an error.
type refusal string

func (r refusal) Error() string { return string(r) }

// MayProve returns the reason for which AdmitProven would refuse an unbound number, so that
// it is not bound needlessly.
func (a *Admission) MayProve(ctx context.Context, id devices.ID, clientID, serial string) (refused string) {
	m := devices.Member{ID: id}
	if a.registry.Status(id, clientID).Known {
		ctx, cancel := context.WithTimeout(ctx, session.LookupTimeout)
		defer cancel()
		row, err := a.ports.Records.Find(ctx, id)
		if err != nil {
			return RefusedUnavailable
		}
		m = row.Device.Member()
	}
	return refusalReason(&m, a.pending.has(id, time.Now()), clientID, serial, false)
}

func refusalReason(m *devices.Member, waits bool, clientID, serial string, bound bool) (reason string) {
	switch {
	case !m.Known() && !waits:
		return RefusedUnknown
	case m.Admission == devices.AdmissionRevoked || m.Refused.Has(clientID):
		return RefusedRevoked
	case m.Known() && m.ClientID != "" && m.ClientID != clientID && !bound && m.Serial != serial:
		return RefusedForeign
	}
	return ""
}

// ReportDispute records that a proof for the device was refused. The device is shown as
// contested for a while; nothing else changes.
func (a *Admission) ReportDispute(id devices.ID, clientID, serial string, reason devices.Dispute) {
	now, client := time.Now(), a.registry.Client(clientID)
	a.hub.Stats().Contested.Add(reason, 1)
	a.addDispute(id, now)
	a.ports.Directory.PublishNews(devices.News{Dispute: &devices.DisputeNews{Device: id, Reason: reason}})
	a.log.Warn("device id is contested", "device", id, "client", client, "serial", serial, "reason", string(reason))
	a.ports.Audit.Record(audit.Entry{At: now, Kind: audit.KindRefusal, Action: "prove", Device: string(id), Outcome: string(reason), Detail: devices.Clip("serial " + serial + ", client " + client)})
	fields := jsonspan.AppendString([]byte(`"client":`), client)
	fields = jsonspan.AppendString(append(fields, `,"reason":`...), string(reason))
	fields = jsonspan.AppendString(append(fields, `,"serial":`...), serial)
	a.ports.Publisher.Publish(devices.Event{Kind: devices.EventContested, Device: id, Time: now, Fields: fields,
		MsgID: id.Token() + "-contested-" + string(reason) + "-" + strconv.FormatInt(now.Unix()/int64(devices.ContestedPause/time.Second), 10)})
}

func (a *Admission) addDispute(id devices.ID, now time.Time) { a.disputes.add(id, now) }

// maxDisputes is how many disputed ids are kept; the oldest is dropped.
const maxDisputes = 10_000

// disputes holds the ids for which a proof was refused recently.
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

// ids returns the disputed ids.
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

// isRecent is false for a time in the future: the clock was set back since.
func isRecent(at, now time.Time) bool {
	age := now.Sub(at)
	return age >= 0 && age < disputeLifetime
}

// IsContested reports whether clients take the id over from each other, or a proof for it
// was refused recently.
func (a *Admission) IsContested(id devices.ID, now time.Time) bool {
	if a.disputes.has(id, now) {
		return true
	}
	return a.hub.HasTakeovers(id, now)
}

// ContestedIDs returns the contested devices as recorded on this node, sorted.
func (a *Admission) ContestedIDs(now time.Time) []devices.ID {
	ids := append(a.disputes.ids(now), a.hub.TakeoverIDs(now)...)
	slices.Sort(ids)
	return slices.Compact(ids)
}

// Contested returns the number of contested devices as recorded on this node.
func (a *Admission) Contested() int { return len(a.ContestedIDs(time.Now())) }
