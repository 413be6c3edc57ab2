package admission

import (
	"context"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/devices/registry"
	"fleetd/internal/jsonspan"
)

// Limits of activation.
const (
	CodeLifetime    = 10 * time.Minute // of an activation code
	MaxPending      = 10_000           // pending clients of all devices
	MaxWrongCodes   = 10               // per wrongCodeWindow, over all callers
	wrongCodeWindow = time.Minute
	maxClientID     = 128
)

// CheckIn is what a device reports at its OTA check.
type CheckIn struct {
	Device        devices.ID
	ClientID      string
	devices.Facts            // with texts as the device sent them, and without CheckedAt
	Details       string     // as in devices.Check
	From          netip.Addr // of the requesting host, from connlimit.AddressKey; zero if unknown
	Address       netip.Addr // that is shown to operators; zero if unknown
	// Offer is the transport that the reply offers, unless an operator chose one; empty: the
	// node's default.
	Offer devices.Transport
}

// facts returns what the device reported, for its row.
func (c *CheckIn) facts(now time.Time) devices.Facts {
	f := c.Map(devices.Clip)
	f.CheckedAt = now
	return f
}

// CheckInResult is the basis of the OTA reply.
type CheckInResult struct {
	Admitted   bool
	Refused    bool              // it gets neither credentials nor a code
	Generation int64             // of its credentials
	Prefer     devices.Transport // empty for the node's default
	Code       string            // six digits to speak, if not admitted
	Challenge  string
}

// CheckIn admits a device or makes it pending. A member is admitted from memory. An unknown
// device becomes a member under open admission, for which it waits for the database; a known
// one with another Client-Id always needs approval. A client that an operator refused stays
// refused until it is approved; so does one without a Client-Id, by which it could be approved,
// while another client is admitted. The error has CodeUnavailable if the
// node has not read its members, the database does not accept a new one, or too many
// devices are pending.
func (a *Admission) CheckIn(ctx context.Context, c CheckIn) (CheckInResult, error) {
	if len(c.ClientID) > maxClientID {
		return CheckInResult{}, devices.Errorf(devices.CodeBadRequest, "Client-Id has %d bytes, at most %d are allowed", len(c.ClientID), maxClientID)
	}
	if err := a.registry.CheckReady(); err != nil {
		return CheckInResult{}, err
	}
	at := clock.Now() // before what is recorded of the check
	status := a.registry.Status(c.Device, c.ClientID)
	if a.registry.Refused(c.Device).Has(c.ClientID) || c.ClientID == "" && status.Known && status.Client == registry.ClientOther {
		return CheckInResult{Refused: true, Prefer: status.Prefer}, nil
	}
	joins := !status.Known && !a.cfg.Approve
	mayJoin := joins || status.Member() && status.Client == registry.ClientNone && c.ClientID != ""
	if mayJoin {
		offer := c.Offer
		if offer == devices.TransportNone {
			offer = a.cfg.Offer
		}
		if err := a.registry.Join(ctx, c.Device, c.ClientID, offer); err != nil && devices.AsError(err).Code != devices.CodeForbidden {
			return CheckInResult{}, err
		}
		status = a.registry.Status(c.Device, c.ClientID)
	}
	if status.Admits() {
		if c.ClientID != "" || joins { // else anybody could have sent it
			a.hub.OnFacts(devices.Check{Device: c.Device, Facts: c.facts(at), Details: c.Details})
		}
		generation, _ := a.hub.Generation(c.Device)
		return CheckInResult{Admitted: true, Generation: generation, Prefer: status.Prefer}, nil
	}
	return a.addPending(c, status, time.Now())
}

// addPending gives a client an activation code. Pending clients are only in memory, on all
// nodes, until they are approved.
func (a *Admission) addPending(c CheckIn, status registry.Status, now time.Time) (CheckInResult, error) {
	p, fresh, err := a.pending.get(c, status.Known, now)
	if err != nil {
		return CheckInResult{}, err
	}
	if fresh {
		a.ports.Directory.PublishNews(devices.News{Pending: p.news(c.Device)})
		client := a.registry.Client(c.ClientID)
		fields := jsonspan.AppendString([]byte(`"client":`), client)
		fields = strconv.AppendBool(append(fields, `,"known":`...), status.Known)
		a.ports.Publisher.Publish(devices.Event{Kind: devices.EventPending, Device: c.Device, Time: now, Fields: fields,
			MsgID: c.Device.Token() + "-pending-" + p.challenge})
		a.log.Info("device is pending approval", "device", c.Device, "client", client, "known", status.Known)
	}
	generation, _ := a.hub.Generation(c.Device)
	return CheckInResult{Generation: generation, Prefer: status.Prefer, Code: p.code, Challenge: p.challenge}, nil
}

// Recognize is CheckIn for a device that proves its identity otherwise than by an OTA check
// and reports nothing else. An empty clientID stands for that of the member, if there is one.
func (a *Admission) Recognize(ctx context.Context, id devices.ID, clientID string) (CheckInResult, error) {
	if err := a.registry.CheckReady(); err != nil {
		return CheckInResult{}, err
	}
	if status := a.registry.Status(id, clientID); status.Member() && (clientID == "" || status.Client == registry.ClientSame) {
		generation, ok := a.hub.Generation(id)
		return CheckInResult{Admitted: ok, Generation: generation, Prefer: status.Prefer}, nil
	}
	return a.CheckIn(ctx, CheckIn{Device: id, ClientID: clientID, Offer: devices.TransportMQTT})
}

// IsActivated reports whether the client is admitted.
func (a *Admission) IsActivated(id devices.ID, clientID string) bool {
	status := a.registry.Status(id, clientID)
	return status.Admits()
}

// Approve admits a pending or refused client of a device, or a revoked device with its
// client. name is a device id or an activation code; wrong codes are limited. client is the
// client as registry.Client shows it; it may be empty if a code names the client, or if only
// one is pending and no other one is admitted. The credentials of a replaced client end.
func (a *Admission) Approve(ctx context.Context, principal access.Principal, name, client string) (devices.ID, error) {
	id, waiting, named, err := a.resolve(name)
	if err != nil {
		return "", err
	}
	if client != "" {
		waiting = slices.DeleteFunc(append(waiting, a.registry.Refused(id).List()...), func(w string) bool { return a.registry.Client(w) != client })
		named = true
	}
	approved := "" // keeps the admitted client
	switch status := a.registry.Status(id, ""); {
	case len(waiting) > 1 && !named:
		return "", devices.Errorf(devices.CodeConflict, "%d clients wait for approval as device %s: %s; name the client to approve", len(waiting), id, a.clientNames(waiting))
	case len(waiting) > 0:
		approved = waiting[0]
	case client != "":
	case status.Member():
		return id, nil
	case !status.Known:
		return "", registry.UnknownDevice(id)
	}
	return id, a.admit(ctx, principal.Key(), id, approved, func(m *devices.Member) error {
		switch {
		case len(waiting) == 0 && client != "" && (!m.Known() || a.registry.Client(m.ClientID) != client):
			return unknownClient(id, client)
		case approved != "" && m.Known() && m.ClientID != "" && m.ClientID != approved && !named:
			return devices.Errorf(devices.CodeConflict, "device %s has another client already, %s; name the client to approve: %s", id, a.registry.Client(m.ClientID), a.registry.Client(approved))
		}
		return permitKnown(principal, m)
	})
}

// Refuse refuses a client of the device alone, as registry.Client shows it, until it is
// approved: it gets neither credentials nor a code.
func (a *Admission) Refuse(ctx context.Context, principal access.Principal, id devices.ID, client string) error {
	if len(client) != 12 || strings.Trim(client, "0123456789abcdef") != "" {
		return devices.Errorf(devices.CodeBadRequest, "a client is named by 12 hex digits, as a device shows it in pending")
	}
	if !a.registry.Status(id, "").Known && !a.pending.has(id, time.Now()) && a.registry.Refused(id) == "" {
		return a.unknown(id)
	}
	refused := ""
	for _, w := range a.pending.clients(id) {
		if a.registry.Client(w.clientID) == client {
			refused = w.clientID
		}
	}
	for _, r := range a.registry.Refused(id).List() {
		if a.registry.Client(r) == client {
			refused = r
		}
	}
	err := a.registry.Refuse(ctx, principal.Key(), id, refused, func(m *devices.Member) error {
		switch {
		case m.Known() && a.registry.Client(m.ClientID) == client:
			return devices.Errorf(devices.CodeConflict, "%s is the admitted client of device %s; revoke the device to end its credentials", client, id)
		case refused == "":
			return unknownClient(id, client)
		}
		return permitKnown(principal, m)
	})
	if err == nil {
		a.log.Info("client refused", "device", id, "client", client)
	}
	return err
}

func unknownClient(id devices.ID, client string) error {
	return devices.Errorf(devices.CodeNotFound, "no client %s waits for approval as device %s; the device shows those that wait in pending", client, id)
}

// permitKnown is Permit for a device that may be unknown: then it is pending, and has no labels.
func permitKnown(principal access.Principal, m *devices.Member) error {
	if !m.Known() {
		return nil
	}
	return Permit(principal, m.ID)(m)
}

// clientNames returns how clients are shown, separated by commas.
func (a *Admission) clientNames(clientIDs []string) string {
	var names []string
	for _, c := range clientIDs {
		names = append(names, a.registry.Client(c))
	}
	return strings.Join(names, ", ")
}

// admit makes the device a member, with this Client-Id unless it is empty. refuse may
// refuse it based on the state in the database.
func (a *Admission) admit(ctx context.Context, who string, id devices.ID, client string, refuse func(*devices.Member) error) error {
	changes, err := a.registry.Approve(ctx, who, id, client, refuse)
	if err != nil {
		return err
	}
	for _, p := range a.pending.clients(id) {
		if p.clientID == client && !p.facts.CheckedAt.IsZero() {
			a.hub.OnFacts(devices.Check{Device: id, Facts: p.facts})
		}
	}
	a.pending.drop(id)
	if len(changes) > 0 {
		a.log.Info("device approved", "device", id, "client", a.registry.Client(client))
	}
	return nil
}

// resolve returns the device of name, which is its id or an activation code, and the
// Client-Ids that are pending; for a code the client that has it, and spoken is true.
func (a *Admission) resolve(name string) (id devices.ID, waiting []string, spoken bool, err error) {
	id, err = devices.ParseID(name)
	if err == nil && (a.registry.Status(id, "").Known || a.pending.has(id, time.Now()) || a.registry.Refused(id) != "") {
		for _, w := range a.pending.clients(id) {
			waiting = append(waiting, w.clientID)
		}
		return id, waiting, false, nil
	}
	switch {
	case isCode(name):
		id, client, err := a.pending.byCode(name, time.Now())
		return id, []string{client}, true, err
	case err != nil:
		return "", nil, false, devices.Errorf(devices.CodeBadRequest, "%v", err)
	}
	return "", nil, false, a.unknown(id)
}

// unknown returns the error for a device that this node does not know.
func (a *Admission) unknown(id devices.ID) error {
	if err := a.registry.CheckReady(); err != nil {
		return err
	}
	return registry.UnknownDevice(id)
}

func isCode(name string) bool {
	_, err := strconv.ParseUint(name, 10, 32)
	return err == nil && len(name) == 6
}

// Revoke ends the device's credentials and its session; it needs approval at its next check.
// While the database is unreachable the revocation applies on the nodes in the result, and
// is written later.
func (a *Admission) Revoke(ctx context.Context, principal access.Principal, id devices.ID) (registry.RevokeResult, error) {
	r, err := a.registry.Revoke(ctx, principal.Key(), id, Permit(principal, id))
	if err == nil {
		a.log.Info("device revoked", "device", id, "recorded", r.Recorded)
	}
	return r, err
}

// Forget removes a device and its history. Its generation is raised, so that credentials it
// still has stay invalid. A pending device is removed until it checks in again.
func (a *Admission) Forget(ctx context.Context, principal access.Principal, id devices.ID) error {
	return a.ForgetAt(ctx, principal, id, 0)
}

// ForgetAt is Forget for a device at this revision; 0 accepts any.
func (a *Admission) ForgetAt(ctx context.Context, principal access.Principal, id devices.ID, ifMatch int64) error {
	waited := a.pending.has(id, time.Now())
	err := a.registry.ForgetAt(ctx, principal.Key(), id, ifMatch, Permit(principal, id))
	if err == nil || devices.AsError(err).Code == devices.CodeDeviceUnknown {
		a.pending.drop(id)
	}
	if waited && err != nil && devices.AsError(err).Code == devices.CodeDeviceUnknown {
		return nil
	}
	if err == nil {
		a.log.Info("device forgotten", "device", id)
	}
	return err
}

// Preview returns what CheckIn would return for the device's admitted client now, without
// changing anything.
func (a *Admission) Preview(id devices.ID) CheckInResult {
	status := a.registry.Status(id, "")
	generation, ok := a.hub.Generation(id)
	return CheckInResult{Admitted: status.Member() || !status.Known && ok && !a.cfg.Approve, Generation: generation, Prefer: status.Prefer}
}

// IsKnown reports whether the device is known or pending. It is true for all devices until
// the members are read.
func (a *Admission) IsKnown(id devices.ID) bool {
	return !a.registry.Ready() || a.registry.Status(id, "").Known || a.pending.has(id, time.Now())
}

// IsMember reports whether the device is a member.
func (a *Admission) IsMember(id devices.ID) bool { return a.registry.Status(id, "").Member() }

// MayBeMember reports whether the device is a member, or the members are not read yet. It is
// for adapters that act for the device.
func (a *Admission) MayBeMember(id devices.ID) bool { return !a.registry.Ready() || a.IsMember(id) }

// ClientOf returns the admitted Client-Id of a device; empty if there is none, or the
// database cannot be read.
func (a *Admission) ClientOf(ctx context.Context, id devices.ID) string {
	m, err := a.registry.Member(ctx, id)
	if err != nil {
		return ""
	}
	return m.ClientID
}
