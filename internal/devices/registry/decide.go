package registry

import (
	"context"
	"crypto/rand"
	"errors"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
)

// decide makes one decision; its changes are in force here when it returns.
func (r *Registry) decide(ctx context.Context, d devices.Decision) ([]devices.Change, error) {
	outcomes, err := r.Decide(ctx, []devices.Decision{d})
	if err != nil {
		return nil, err
	}
	return outcomes[0].Changes, outcomes[0].Err
}

// Decide makes decisions, each of one device; their changes are in force here when
// it returns.
func (r *Registry) Decide(ctx context.Context, list []devices.Decision) ([]devices.Outcome, error) {
	return r.DecideMany(ctx, list, nil)
}

// DecideMany is Decide. committed, if not nil, is called when the changes are in
// the database and before they are in force here.
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
	var last int64 // what was decided from has to be in force here, too: another node may have decided it
	for _, o := range outcomes {
		changes = append(changes, o.Changes...)
		last = max(last, o.After.Revision, o.Before.Revision)
	}
	r.tell(changes)
	r.inForce(ctx, last, changes)
	return outcomes, nil
}

// tell takes changes that are in the database, and tells others.
func (r *Registry) tell(changes []devices.Change) {
	if len(changes) == 0 {
		return
	}
	r.Offer(changes)
	if r.opt.Peers != nil {
		r.opt.Peers.Tell(changes)
	}
}

// committed brings changes into force that are in the database, and tells others.
func (r *Registry) committed(ctx context.Context, changes []devices.Change) error {
	if len(changes) == 0 {
		return nil
	}
	r.tell(changes)
	last := changes[0].Revision
	for _, c := range changes {
		last = max(last, c.Revision)
	}
	r.inForce(ctx, last, changes)
	return nil
}

// inForce waits until the changes up to a revision, all of them committed and own
// ones among them, are in force here.
func (r *Registry) inForce(ctx context.Context, revision int64, own []devices.Change) {
	err := r.await(ctx, revision)
	if err == nil && len(own) > 0 && !r.hasApplied(own[len(own)-1]) { // what is in force has these revisions from another history
		err = r.Refresh(ctx)
	}
	if err != nil { // it comes into force with what is missing before it
		r.opt.Log.Warn("a decision is recorded and may not be in force on this node yet", "revision", revision, "error", err)
	}
}

// isCode tells whether an error has this code.
func isCode(err error, code devices.Code) bool {
	return err != nil && devices.AsError(err).Code == code
}

// unavailable is an error of the ledger as callers see it.
func unavailable(err error) error {
	switch {
	case errors.Is(err, devices.ErrUncertain):
		return &devices.Error{Code: devices.CodeUnavailable, Part: "database", Detail: "the database failed while it recorded this; look whether it did before you repeat it"}
	case errors.Is(err, devices.ErrDatabase):
		return &devices.Error{Code: devices.CodeUnavailable, Part: "database", Detail: "the database does not answer, and nothing is decided without it; try again"}
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return &devices.Error{Code: devices.CodeUnavailable, Part: "database", Detail: "the database did not answer in time; look whether the decision was made before you repeat it"}
	}
	return err
}

// Join makes a device a member that comes by itself, with this client, which was
// offered this transport. An unknown one becomes a member; one that is known
// without a client gets this one. Any other outcome is an error. It waits for
// JoinLimit at most; what the database then still makes of it holds when the
// device asks again.
func (r *Registry) Join(ctx context.Context, id devices.ID, clientID string, offered devices.Transport) error {
	if s := r.Standing(id, clientID); !s.Known && r.Members() >= r.opt.Limit {
		r.Stats.FullJoins.Add(1)
		return &devices.Error{Code: devices.CodeUnavailable, Part: "members", Detail: "the fleet has as many devices as --members-limit allows; forget some, or raise it"}
	}
	ctx, cancel := context.WithTimeout(ctx, JoinLimit)
	defer cancel()
	err := r.outlast(ctx, func(ctx context.Context) error {
		_, err := r.decide(ctx, devices.Decision{Device: id, Who: "device", Decide: func(m *devices.Member) error { return join(m, clientID, offered) }})
		return err
	})
	if err == nil && !r.Standing(id, clientID).Admits() { // recorded, and not in force here yet
		err = &devices.Error{Code: devices.CodeUnavailable, Part: "database", Detail: "the database is slow, and this node does not know the device as a member yet; try again"}
	}
	if err != nil && ctx.Err() != nil {
		r.Stats.LateJoins.Add(1)
	}
	return err
}

func join(m *devices.Member, clientID string, offered devices.Transport) error {
	switch {
	case m.Admission == devices.AdmissionRevoked:
		return devices.Errorf(devices.CodeForbidden, "the device was revoked; approve it")
	case !m.Known():
		m.Admission, m.ClientID, m.Joined = devices.AdmissionMember, clientID, offered
	case m.ClientID == "":
		m.ClientID = clientID
	case m.ClientID != clientID:
		return devices.Errorf(devices.CodeForbidden, "another client is admitted under the id")
	}
	return nil
}

// outlast waits for a decision until ctx ends; the decision itself goes on for
// decideLimit, unless maxLate of them do so already.
func (r *Registry) outlast(ctx context.Context, decide func(context.Context) error) error {
	select {
	case r.late <- struct{}{}:
	default:
		return decide(ctx)
	}
	done := make(chan error, 1)
	r.tasks.Go(func() {
		defer func() { <-r.late }()
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

// Approve admits a client under the id; an empty one leaves that as it is. The
// credentials of a client that it replaces end. refuse, if set, may prevent it.
func (r *Registry) Approve(ctx context.Context, who string, id devices.ID, clientID string, refuse func(m *devices.Member) error) ([]devices.Change, error) {
	if r.revocationOf(id) {
		return nil, &devices.Error{Code: devices.CodeUnavailable, Part: "database", Detail: "a revocation of the device is not recorded yet; approve it again when the database has taken that"}
	}
	return r.decideSoon(ctx, devices.Decision{Device: id, Who: who, DecideWith: func(m *devices.Member, rotation devices.Rotation) error {
		if refuse != nil {
			if err := refuse(m); err != nil {
				return err
			}
		}
		replaced := m.ClientID != "" && clientID != "" && clientID != m.ClientID
		m.Admission = devices.AdmissionMember
		if clientID != "" {
			m.ClientID = clientID
		}
		if replaced {
			Raise(m, rotation, "approved")
		}
		m.Joined = devices.TransportNone
		return nil
	}})
}

// Raise begins a new generation of the device's credentials.
func Raise(m *devices.Member, rotation devices.Rotation, reason string) {
	m.Generation = max(m.Generation, rotation.Generation) + 1
	m.Previous, m.PreviousUntil, m.Reason = 0, time.Time{}, reason
}

// decideSoon is decide within the time that an operator waits.
func (r *Registry) decideSoon(ctx context.Context, d devices.Decision) ([]devices.Change, error) {
	ctx, cancel := context.WithTimeout(ctx, decideLimit)
	defer cancel()
	return r.decide(ctx, d)
}

// revoke ends all credentials of a device. It is a maximum: made twice, or after
// another decision about them, it holds as well.
func revoke(permits ...Permit) func(m *devices.Member, rotation devices.Rotation) error {
	return func(m *devices.Member, rotation devices.Rotation) error {
		if !m.Known() {
			return Unknown(m.ID)
		}
		if err := permitted(m, permits); err != nil {
			return err
		}
		if m.Admission != devices.AdmissionRevoked {
			m.Admission = devices.AdmissionRevoked
			Raise(m, rotation, "revoked")
		}
		return nil
	}
}

// Unknown is the error for a device that is not known.
func Unknown(id devices.ID) error {
	return devices.Errorf(devices.CodeDeviceUnknown, "no device %s is known", id)
}

// Permit refuses a decision about a device by what the database holds of it; the
// caller was asked before by what this node has, which may be older.
type Permit func(m *devices.Member) error

func permitted(m *devices.Member, permits []Permit) error {
	for _, permit := range permits {
		if err := permit(m); err != nil {
			return err
		}
	}
	return nil
}

// Revoke ends all credentials of a device. While the database is away it is in
// force as well, on this node and on those that confirm it.
func (r *Registry) Revoke(ctx context.Context, who string, id devices.ID, permits ...Permit) (Revoked, error) {
	if err := r.Judge(); err != nil {
		return Revoked{}, err
	}
	if !r.Standing(id, "").Known {
		return Revoked{}, Unknown(id)
	}
	p := Revocation{ID: rand.Text(), Device: id, Who: who, At: time.Now().UTC()}
	_, err := r.decideSoon(ctx, devices.Decision{ID: p.ID, Device: id, Who: who, DecideWith: revoke(permits...)})
	if isCode(err, devices.CodeUnavailable) {
		return r.pend(ctx, p)
	}
	return Revoked{Recorded: err == nil}, err
}

// Forget removes a device. Credentials that it was given end with it.
func (r *Registry) Forget(ctx context.Context, who string, id devices.ID) error {
	return r.ForgetAt(ctx, who, id, 0)
}

// ForgetAt is Forget for the device at this revision; 0: whatever it is.
func (r *Registry) ForgetAt(ctx context.Context, who string, id devices.ID, ifMatch int64, permits ...Permit) error {
	_, err := r.decideSoon(ctx, devices.Decision{Device: id, Who: who, DecideWith: func(m *devices.Member, rotation devices.Rotation) error {
		if err := editable(m, ifMatch); err != nil {
			return err
		}
		if err := permitted(m, permits); err != nil {
			return err
		}
		m.Admission = devices.AdmissionForgotten
		if m.ClientID != "" || m.Generation > 0 {
			Raise(m, rotation, ReasonForgotten)
		}
		return nil
	}})
	return err
}

// ReasonForgotten is the reason of the exception that a forgotten device leaves.
const ReasonForgotten = "forgotten"

// Expire removes devices that joined by themselves, if nobody decided about them
// since. What credentials they have stay valid: one that comes with them joins
// again.
func (r *Registry) Expire(ctx context.Context, ids []devices.ID) (expired int, err error) {
	list := make([]devices.Decision, len(ids))
	for i, id := range ids {
		list[i] = devices.Decision{Device: id, Who: "expiry", Decide: func(m *devices.Member) error {
			if m.Known() && m.Joined != devices.TransportNone {
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

// Edit changes what an operator writes on a device. ifMatch is the revision that
// the operator has seen; 0: whatever it is.
func (r *Registry) Edit(ctx context.Context, who string, id devices.ID, ifMatch int64, edit func(m *devices.Member) error) ([]devices.Change, error) {
	return r.decideSoon(ctx, devices.Decision{Device: id, Who: who, Decide: func(m *devices.Member) error {
		if err := editable(m, ifMatch); err != nil {
			return err
		}
		return edit(m)
	}})
}

// editable refuses an edit of a device that is not known, or not at the revision
// that the operator has seen; 0: whatever it is.
func editable(m *devices.Member, ifMatch int64) error {
	switch {
	case !m.Known():
		return Unknown(m.ID)
	case ifMatch > 0 && m.Revision != ifMatch:
		return devices.Errorf(devices.CodeChanged, "%s is at revision %d, not %d: read it again and make your change there", m.ID, m.Revision, ifMatch)
	}
	return nil
}

// Rotate begins a new generation; the one before stays valid until a time, or
// until the device has connected with the new one. confirmed is the highest
// generation that it has connected with.
func (r *Registry) Rotate(ctx context.Context, who string, id devices.ID, until time.Time, confirmed int64, permits ...Permit) error {
	_, err := r.decideSoon(ctx, devices.Decision{Device: id, Who: who, DecideWith: func(m *devices.Member, rotation devices.Rotation) error {
		if err := editable(m, 0); err != nil {
			return err
		}
		if err := permitted(m, permits); err != nil {
			return err
		}
		if m.Admission == devices.AdmissionRevoked {
			return devices.Errorf(devices.CodeForbidden, "the credentials of %s are revoked already; approve it to give it new ones", id)
		}
		if time.Now().Before(m.PreviousUntil) && confirmed < max(m.Generation, rotation.Generation) {
			return devices.Errorf(devices.CodeForbidden, "%s was rotated already and has not come with its new credentials yet; its old ones end at %s, or at once if you revoke it",
				id, m.PreviousUntil.UTC().Format(time.RFC3339))
		}
		before := m.Generation // its own: what the fleet's rotation keeps valid beside it stays so
		Raise(m, rotation, "rotated")
		m.Previous, m.PreviousUntil = before, until.UTC().Truncate(time.Microsecond)
		return nil
	}})
	return err
}

// RotateFleet replaces the rotation of the fleet by what decide makes of it; highest is
// the highest generation of a single device.
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
	return next, r.committed(ctx, changes)
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
	return changes, r.committed(ctx, changes)
}

// EndKey ends an API key. While the database is away it is in force as well, on
// this node and on those that confirm it.
func (r *Registry) EndKey(ctx context.Context, who string, k access.Key) (Revoked, error) {
	p := Revocation{ID: rand.Text(), Key: k.ID, Who: who, At: k.Revoked}
	within, cancel := context.WithTimeout(ctx, decideLimit)
	defer cancel()
	_, err := r.saveKey(within, who, p.ID, k)
	if isCode(err, devices.CodeUnavailable) {
		return r.pend(ctx, p)
	}
	return Revoked{Recorded: err == nil}, err
}

// SavePolicy records a version of the policy, or fails with devices.ErrConflict.
func (r *Registry) SavePolicy(ctx context.Context, who string, p access.Policy) error {
	ctx, cancel := context.WithTimeout(ctx, decideLimit)
	defer cancel()
	changes, err := r.opt.Ledger.SavePolicy(ctx, who, p)
	if err != nil {
		return unavailable(err)
	}
	return r.committed(ctx, changes)
}
