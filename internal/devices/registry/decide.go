package registry

import (
	"context"
	"crypto/rand"
	"errors"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
)

// decide makes one decision. Its changes are in force here when it returns.
func (r *Registry) decide(ctx context.Context, d devices.Decision) ([]devices.Change, error) {
	outcomes, err := r.Decide(ctx, []devices.Decision{d})
	if err != nil {
		return nil, err
	}
	return outcomes[0].Changes, outcomes[0].Err
}

// Decide makes decisions, each about one device. Their changes are in force here when it
// returns.
func (r *Registry) Decide(ctx context.Context, list []devices.Decision) ([]devices.Outcome, error) {
	return r.DecideMany(ctx, list, nil)
}

// DecideMany is Decide. committed, if not nil, is called after the commit and before the
// changes are in force here.
func (r *Registry) DecideMany(ctx context.Context, list []devices.Decision, committed func()) ([]devices.Outcome, error) {
	for i := range list {
		if list[i].ID == "" {
			list[i].ID = rand.Text()
		}
	}
	outcomes, err := r.opt.Ledger.Decide(ctx, list)
	if err != nil {
		return nil, unavailable(err)
	}
	if committed != nil {
		committed()
	}
	var changes []devices.Change
	var last int64 // the state that a decision was based on must be in force here, too, even if another node decided it
	for _, o := range outcomes {
		changes = append(changes, o.Changes...)
		last = max(last, o.After.Revision, o.Before.Revision)
	}
	r.publish(changes)
	r.awaitApplied(ctx, last, changes)
	return outcomes, nil
}

// publish applies committed changes and sends them to other nodes.
func (r *Registry) publish(changes []devices.Change) {
	if len(changes) == 0 {
		return
	}
	r.Offer(changes)
	if r.opt.Peers != nil {
		r.opt.Peers.Publish(changes)
	}
}

// applyCommitted publishes committed changes and waits until they are in force.
func (r *Registry) applyCommitted(ctx context.Context, changes []devices.Change) error {
	if len(changes) == 0 {
		return nil
	}
	r.publish(changes)
	r.awaitApplied(ctx, changes[len(changes)-1].Revision, changes)
	return nil
}

// awaitApplied waits until the changes up to a revision are in force here. own are the
// latest committed changes of this node.
func (r *Registry) awaitApplied(ctx context.Context, revision int64, own []devices.Change) {
	err := r.await(ctx, revision)
	if err == nil && len(own) > 0 && !r.hasApplied(own[len(own)-1]) { // the changes in force have these revisions from another history
		err = r.Refresh(ctx)
	}
	if err != nil { // it comes into force with the missing changes before it
		r.opt.Log.Warn("a decision is recorded but may not be in force on this node yet", "revision", revision, "error", err)
	}
}

// isCode reports whether an error has this code.
func isCode(err error, code devices.Code) bool {
	return err != nil && devices.AsError(err).Code == code
}

// unavailable turns an error of the ledger into one for callers.
func unavailable(err error) error {
	switch {
	case errors.Is(err, devices.ErrUncertain):
		return &devices.Error{Code: devices.CodeUnavailable, Part: "database", Detail: "the database failed during the commit; check whether the change was made before you repeat it"}
	case errors.Is(err, devices.ErrDatabase):
		return &devices.Error{Code: devices.CodeUnavailable, Part: "database", Detail: "the database does not answer, and no change can be made without it; try again"}
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return &devices.Error{Code: devices.CodeUnavailable, Part: "database", Detail: "the database did not answer in time; check whether the change was made before you repeat it"}
	}
	return err
}

// Join makes a device that joins by itself a member, with this client and the transport
// that it was offered. An unknown device becomes a member; a known one without a client
// gets this client; anything else is an error. It waits for at most JoinLimit; if the
// database commits later, the device is a member at its next attempt.
func (r *Registry) Join(ctx context.Context, id devices.ID, clientID string, offered devices.Transport) error {
	if s := r.Status(id, clientID); !s.Known && r.Members() >= r.opt.Limit {
		r.Stats.FullJoins.Add(1)
		return &devices.Error{Code: devices.CodeUnavailable, Part: "members", Detail: DetailFull}
	}
	ctx, cancel := context.WithTimeout(ctx, JoinLimit)
	defer cancel()
	err := r.decideDetached(ctx, func(ctx context.Context) error {
		_, err := r.decide(ctx, devices.Decision{Device: id, Who: "device", Decide: func(m *devices.Member) error { return join(m, clientID, offered) }})
		return err
	})
	if err == nil && !r.Status(id, clientID).Admits() { // recorded but not in force here yet
		err = &devices.Error{Code: devices.CodeUnavailable, Part: "database", Detail: "the database is slow, and the device is not a member on this node yet; try again"}
	}
	if err != nil && ctx.Err() != nil {
		r.Stats.LateJoins.Add(1)
	}
	return err
}

// DetailFull is the detail of errors that refuse a member above the limit.
const DetailFull = "the fleet has reached --members-limit; forget devices or raise the limit"

func join(m *devices.Member, clientID string, offered devices.Transport) error {
	switch {
	case m.Admission == devices.AdmissionRevoked || m.Refused.Has(clientID):
		return devices.Errorf(devices.CodeForbidden, "the device was revoked, or the client was refused; approve it to admit it")
	case !m.Known():
		m.Admission, m.ClientID, m.JoinTransport = devices.AdmissionMember, clientID, offered
	case m.ClientID == "":
		m.ClientID = clientID
	case m.ClientID != clientID:
		return devices.Errorf(devices.CodeForbidden, "the device has another admitted client")
	}
	return nil
}

// decideDetached waits for a decision until ctx ends; the decision itself continues for
// decideLimit, unless maxDetached decisions do so already.
func (r *Registry) decideDetached(ctx context.Context, decide func(context.Context) error) error {
	select {
	case r.detached <- struct{}{}:
	default:
		return decide(ctx)
	}
	done := make(chan error, 1)
	r.tasks.Go(func() {
		defer func() { <-r.detached }()
		ctx, cancel := context.WithTimeout(r.ctx, decideLimit)
		defer cancel()
		done <- decide(ctx)
	})
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return unavailable(ctx.Err())
	}
}

// Approve admits a client of the device; an empty one keeps the current client. The
// credentials of a replaced client end. refuse, if not nil, may refuse it.
func (r *Registry) Approve(ctx context.Context, who string, id devices.ID, clientID string, refuse func(m *devices.Member) error) ([]devices.Change, error) {
	if r.revocationOf(id) {
		return nil, &devices.Error{Code: devices.CodeUnavailable, Part: "database", Detail: "a revocation of the device is not written to the database yet; approve the device again later"}
	}
	return r.decideSoon(ctx, devices.Decision{Device: id, Who: who, DecideWith: func(m *devices.Member, rotation devices.Rotation) error {
		if refuse != nil {
			if err := refuse(m); err != nil {
				return err
			}
		}
		if !m.Known() && r.Members() >= r.opt.Limit {
			return devices.Errorf(devices.CodeLimitReached, DetailFull)
		}
		replaced := m.ClientID != "" && clientID != "" && clientID != m.ClientID
		m.Admit(clientID)
		if replaced {
			RaiseGeneration(m, rotation, "approved")
		}
		return nil
	}})
}

// Refuse refuses a client of the device until it is approved, unless check fails.
func (r *Registry) Refuse(ctx context.Context, who string, id devices.ID, clientID string, check func(m *devices.Member) error) error {
	_, err := r.decideSoon(ctx, devices.Decision{Device: id, Who: who, Decide: func(m *devices.Member) error {
		m.Refused = m.Refused.With(clientID)
		return check(m)
	}})
	return err
}

// RaiseGeneration starts a new generation of the device's credentials.
func RaiseGeneration(m *devices.Member, rotation devices.Rotation, reason string) {
	m.Generation = max(m.Generation, rotation.Generation) + 1
	m.Previous, m.PreviousUntil, m.Reason = 0, time.Time{}, reason
}

// decideSoon is decide with the time limit of an operator's request.
func (r *Registry) decideSoon(ctx context.Context, d devices.Decision) ([]devices.Change, error) {
	ctx, cancel := context.WithTimeout(ctx, decideLimit)
	defer cancel()
	return r.decide(ctx, d)
}

// revoke ends all credentials of a device. It is idempotent, and has the same result
// after other decisions about them.
func revoke(permits ...Permit) func(m *devices.Member, rotation devices.Rotation) error {
	return func(m *devices.Member, rotation devices.Rotation) error {
		if !m.Known() {
			return UnknownDevice(m.ID)
		}
		if err := checkPermits(m, permits); err != nil {
			return err
		}
		if m.Admission != devices.AdmissionRevoked {
			m.Admission = devices.AdmissionRevoked
			RaiseGeneration(m, rotation, "revoked")
		}
		return nil
	}
}

// UnknownDevice returns the error for an unknown device.
func UnknownDevice(id devices.ID) error {
	return devices.Errorf(devices.CodeDeviceUnknown, "unknown device %s", id)
}

// Permit refuses a decision based on the device's state in the database; the caller was
// checked before with the state of this node, which may be older.
type Permit func(m *devices.Member) error

func checkPermits(m *devices.Member, permits []Permit) error {
	for _, permit := range permits {
		if err := permit(m); err != nil {
			return err
		}
	}
	return nil
}

// Revoke ends all credentials of a device. While the database is unreachable it applies
// on this node and on those that confirm it.
func (r *Registry) Revoke(ctx context.Context, who string, id devices.ID, permits ...Permit) (RevokeResult, error) {
	if err := r.CheckReady(); err != nil {
		return RevokeResult{}, err
	}
	if !r.Status(id, "").Known {
		return RevokeResult{}, UnknownDevice(id)
	}
	p := Revocation{ID: rand.Text(), Device: id, Who: who, At: clock.Now()}
	_, err := r.decideSoon(ctx, devices.Decision{ID: p.ID, Device: id, Who: who, DecideWith: revoke(permits...)})
	if isCode(err, devices.CodeUnavailable) {
		return r.revokeWithoutDatabase(ctx, p)
	}
	return RevokeResult{Recorded: err == nil}, err
}

// ForgetAt removes a device at this revision and ends its credentials; 0 accepts any.
func (r *Registry) ForgetAt(ctx context.Context, who string, id devices.ID, ifMatch int64, permits ...Permit) error {
	_, err := r.decideSoon(ctx, devices.Decision{Device: id, Who: who, DecideWith: func(m *devices.Member, rotation devices.Rotation) error {
		if err := checkEditable(m, ifMatch); err != nil {
			return err
		}
		if err := checkPermits(m, permits); err != nil {
			return err
		}
		m.Admission = devices.AdmissionForgotten
		RaiseGeneration(m, rotation, ReasonForgotten)
		return nil
	}})
	return err
}

// ReasonForgotten is the reason in the exception of a forgotten device.
const ReasonForgotten = "forgotten"

// Expire removes devices that joined by themselves, unless they were decided about
// since. Their credentials stay valid: a device that connects with them joins again.
func (r *Registry) Expire(ctx context.Context, ids []devices.ID) (expired int, err error) {
	list := make([]devices.Decision, len(ids))
	for i, id := range ids {
		list[i] = devices.Decision{Device: id, Who: "expiry", Decide: func(m *devices.Member) error {
			if m.Known() && m.JoinTransport != devices.TransportNone {
				m.Admission = devices.AdmissionExpired
			}
			return nil
		}}
	}
	outcomes, err := r.Decide(ctx, list)
	for _, o := range outcomes {
		if len(o.Changes) > 0 {
			expired++
		}
	}
	return expired, err
}

// Edit changes the values that operators write. ifMatch is the revision that the device
// must have; 0 accepts any.
func (r *Registry) Edit(ctx context.Context, who string, id devices.ID, ifMatch int64, edit func(m *devices.Member) error) ([]devices.Change, error) {
	return r.decideSoon(ctx, devices.Decision{Device: id, Who: who, Decide: func(m *devices.Member) error {
		if err := checkEditable(m, ifMatch); err != nil {
			return err
		}
		return edit(m)
	}})
}

// checkEditable refuses an edit of a device that is unknown or does not have the revision
// ifMatch; 0 accepts any.
func checkEditable(m *devices.Member, ifMatch int64) error {
	switch {
	case !m.Known():
		return UnknownDevice(m.ID)
	case ifMatch > 0 && m.Revision != ifMatch:
		return devices.Errorf(devices.CodeStale, "%s has revision %d, not %d: read it again and repeat your change", m.ID, m.Revision, ifMatch)
	}
	return nil
}

// Rotate starts a new generation of credentials; the current one stays valid until a
// time, or until the device has connected with the new one. confirmed is the highest
// generation that it has connected with.
func (r *Registry) Rotate(ctx context.Context, who string, id devices.ID, until time.Time, confirmed int64, permits ...Permit) error {
	_, err := r.decideSoon(ctx, devices.Decision{Device: id, Who: who, DecideWith: func(m *devices.Member, rotation devices.Rotation) error {
		if err := checkEditable(m, 0); err != nil {
			return err
		}
		if err := checkPermits(m, permits); err != nil {
			return err
		}
		if m.Admission == devices.AdmissionRevoked {
			return devices.Errorf(devices.CodeForbidden, "the credentials of %s are revoked already; approve it to give it new ones", id)
		}
		if clock.Now().Before(m.PreviousUntil) && confirmed < max(m.Generation, rotation.Generation) {
			return devices.Errorf(devices.CodeForbidden, "%s was rotated already and has not connected with its new credentials yet; its old ones end at %s, or at once if you revoke it",
				id, m.PreviousUntil.UTC().Format(time.RFC3339))
		}
		before := m.Generation // the device's own: it also keeps what the fleet's rotation keeps valid
		RaiseGeneration(m, rotation, "rotated")
		m.Previous, m.PreviousUntil = before, until.UTC().Truncate(time.Microsecond)
		return nil
	}})
	return err
}

// RotateFleet replaces the fleet's rotation by the result of decide; highest is the
// highest generation of a single device.
func (r *Registry) RotateFleet(ctx context.Context, who string, decide func(old devices.Rotation, highest int64) (devices.Rotation, error)) (next devices.Rotation, err error) {
	ctx, cancel := context.WithTimeout(ctx, decideLimit)
	defer cancel()
	changes, err := r.opt.Ledger.Rotate(ctx, who, func(old devices.Rotation, highest int64) (devices.Rotation, error) {
		var err error
		next, err = decide(old, highest)
		return next, err
	})
	if err != nil {
		return devices.Rotation{}, unavailable(err)
	}
	return next, r.applyCommitted(ctx, changes)
}

// SaveKey records a new API key.
func (r *Registry) SaveKey(ctx context.Context, who string, k access.Key) error {
	ctx, cancel := context.WithTimeout(ctx, decideLimit)
	defer cancel()
	_, err := r.saveKey(ctx, who, rand.Text(), k)
	return err
}

func (r *Registry) saveKey(ctx context.Context, who, id string, k access.Key) ([]devices.Change, error) {
	changes, err := r.opt.Ledger.SaveKey(ctx, who, id, k)
	if err != nil {
		return nil, unavailable(err)
	}
	return changes, r.applyCommitted(ctx, changes)
}

// RevokeKey revokes an API key. While the database is unreachable it applies on this node
// and on those that confirm it.
func (r *Registry) RevokeKey(ctx context.Context, who string, k access.Key) (RevokeResult, error) {
	p := Revocation{ID: rand.Text(), Key: k.ID, Who: who, At: k.Revoked}
	within, cancel := context.WithTimeout(ctx, decideLimit)
	defer cancel()
	_, err := r.saveKey(within, who, p.ID, k)
	if isCode(err, devices.CodeUnavailable) {
		return r.revokeWithoutDatabase(ctx, p)
	}
	return RevokeResult{Recorded: err == nil}, err
}

// SavePolicy records a version of the policy, or returns devices.ErrConflict.
func (r *Registry) SavePolicy(ctx context.Context, who string, p access.Policy) error {
	ctx, cancel := context.WithTimeout(ctx, decideLimit)
	defer cancel()
	changes, err := r.opt.Ledger.SavePolicy(ctx, who, p)
	if err != nil {
		return unavailable(err)
	}
	return r.applyCommitted(ctx, changes)
}
