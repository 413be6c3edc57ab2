package admission

import (
	"context"
	"net/netip"
	"strconv"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/registry"
	"fleetd/internal/jsonspan"
)

// Limits of activation.
const (
	CodeLife      = 10 * time.Minute // of one spoken code
	MaxPending    = 10_000           // devices waiting with a code at once
	MaxWrongCodes = 10               // per wrongCodeSpan, over all callers
	wrongCodeSpan = time.Minute
	maxClientID   = 128
)

// CheckIn is what a device says at its OTA check.
type CheckIn struct {
	Device     devices.ID
	ClientID   string
	Board      string
	Firmware   string
	ELF        string
	Chip       string
	Language   string
	Serial     string
	ActivateV2 bool
	From       netip.Addr // of the host that asks, as lobby.HostOf makes it; zero if not known
	// Offer is the transport that the reply offers, unless an operator chose
	// another for the device; empty: the node's default.
	Offer devices.Transport
}

// facts are what the device reported, for its row.
func (c *CheckIn) facts(now time.Time) devices.Facts {
	return devices.Facts{Device: c.Device, Board: devices.Clip(c.Board), Firmware: devices.Clip(c.Firmware), ELF: devices.Clip(c.ELF), Chip: devices.Clip(c.Chip),
		Language: devices.Clip(c.Language), Serial: devices.Clip(c.Serial), ActivateV2: c.ActivateV2, CheckedAt: now}
}

// Welcome is what the OTA reply is made of.
type Welcome struct {
	Admitted   bool
	Generation int64             // of its credentials
	Prefer     devices.Transport // empty for the node's default
	Code       string            // six digits to speak while not admitted
	Challenge  string
}

// CheckIn admits a device or makes it wait. A member is admitted from memory. An
// unknown device becomes a member under open admission, for which the database is
// waited for; a known one with another Client-Id waits for approval under either.
// CodeUnavailable: the node does not know its members, the database does not take
// a new one, or too many devices wait.
func (a *Admission) CheckIn(ctx context.Context, c CheckIn) (Welcome, error) {
	if len(c.ClientID) > maxClientID {
		return Welcome{}, devices.Errorf(devices.CodeBadRequest, "Client-Id has %d bytes, at most %d are allowed", len(c.ClientID), maxClientID)
	}
	if err := a.registry.Judge(); err != nil {
		return Welcome{}, err
	}
	now := time.Now().UTC()
	is := a.registry.Standing(c.Device, c.ClientID)
	mayJoin := !is.Known && !a.cfg.Approve || is.Member() && is.Client == registry.ClientNone && c.ClientID != ""
	if mayJoin {
		offer := c.Offer
		if offer == devices.TransportNone {
			offer = a.cfg.Offer
		}
		if err := a.registry.Join(ctx, c.Device, c.ClientID, offer); err != nil && devices.AsError(err).Code != devices.CodeForbidden {
			return Welcome{}, err
		}
		is = a.registry.Standing(c.Device, c.ClientID)
	}
	if is.Admits() {
		a.hub.Reported(c.facts(now))
		generation, _ := a.hub.Generation(c.Device)
		return Welcome{Admitted: true, Generation: generation, Prefer: is.Prefer}, nil
	}
	return a.wait(c, is, now)
}

// wait gives a client a code to speak. That it waits is known in memory alone, on
// all nodes, until somebody approves it.
func (a *Admission) wait(c CheckIn, is registry.Standing, now time.Time) (Welcome, error) {
	p, fresh, err := a.pending.get(c, is.Known, now)
	if err != nil {
		return Welcome{}, err
	}
	if fresh {
		a.ports.Directory.Tell(devices.News{Spoken: p.spoken(c.Device)})
		fields := jsonspan.AppendString([]byte(`"client_id":`), c.ClientID)
		fields = strconv.AppendBool(append(fields, `,"known":`...), is.Known)
		a.ports.Publisher.Publish(devices.Event{Kind: devices.EventPending, Device: c.Device, Time: now, Fields: fields,
			MsgID: c.Device.Token() + "-pending-" + p.challenge})
		a.log.Info("device waits for approval", "device", c.Device, "client", c.ClientID, "known", is.Known)
	}
	generation, _ := a.hub.Generation(c.Device)
	return Welcome{Generation: generation, Prefer: is.Prefer, Code: p.code, Challenge: p.challenge}, nil
}

// Recognize is CheckIn for a device that proves who it is in another way than
// by asking where to go, and says nothing else of itself. An empty clientID is
// that of a member, if there is one.
func (a *Admission) Recognize(ctx context.Context, id devices.ID, clientID string) (Welcome, error) {
	if err := a.registry.Judge(); err != nil {
		return Welcome{}, err
	}
	if is := a.registry.Standing(id, clientID); is.Member() && (clientID == "" || is.Client == registry.ClientSame) {
		generation, ok := a.hub.Generation(id)
		return Welcome{Admitted: ok, Generation: generation, Prefer: is.Prefer}, nil
	}
	return a.CheckIn(ctx, CheckIn{Device: id, ClientID: clientID, Offer: devices.TransportMQTT})
}

// Activated tells whether a device that waited is admitted now.
func (a *Admission) Activated(id devices.ID, clientID string) bool {
	is := a.registry.Standing(id, clientID)
	return is.Admits()
}

// Approve admits the device, or the other Client-Id of a known device, that
// waits. name is a device id or the code the device speaks; wrong codes are
// limited. The credentials of a replaced client die.
func (a *Admission) Approve(ctx context.Context, by access.By, name string) (devices.ID, error) {
	id, spoken, err := a.resolve(name)
	if err != nil {
		return "", err
	}
	is := a.registry.Standing(id, spoken)
	waiting := a.pending.clients(id)
	switch {
	case spoken != "":
	case len(waiting) > 1:
		return "", devices.Errorf(devices.CodeForbidden, "%d clients wait under the id %s; approve the code that the right one speaks", len(waiting), id)
	case len(waiting) == 1:
		spoken = waiting[0].clientID
	case is.Member():
		return id, nil
	case !is.Known:
		return "", registry.Unknown(id)
	}
	permits := Permit(by, id)
	return id, a.admit(ctx, by.Key(), id, spoken, func(m *devices.Member) error {
		if !m.Known() { // it waits, and has no labels
			return nil
		}
		return permits(m)
	})
}

// admit makes the device a member, with this Client-Id unless it is empty. refuse
// may prevent that, by what the database holds of it.
func (a *Admission) admit(ctx context.Context, who string, id devices.ID, client string, refuse func(*devices.Member) error) error {
	changes, err := a.registry.Approve(ctx, who, id, client, refuse)
	if err != nil {
		return err
	}
	for _, p := range a.pending.clients(id) {
		if p.clientID == client && !p.facts.CheckedAt.IsZero() {
			a.hub.Reported(p.facts)
		}
	}
	a.pending.drop(id)
	if len(changes) > 0 {
		a.log.Info("device approved", "device", id, "client", client)
	}
	return nil
}

// resolve finds the device that name means: its id, else its spoken code, and
// then the client that speaks it.
func (a *Admission) resolve(name string) (id devices.ID, spoken string, err error) {
	id, err = devices.ParseID(name)
	if err == nil && (a.registry.Standing(id, "").Known || a.pending.waits(id, time.Now())) {
		return id, "", nil
	}
	switch {
	case isCode(name):
		return a.pending.byCode(name, time.Now())
	case err != nil:
		return "", "", devices.Errorf(devices.CodeBadRequest, "%v", err)
	}
	return "", "", a.unknown(id)
}

// unknown is the error for a device that this node does not know.
func (a *Admission) unknown(id devices.ID) error {
	if err := a.registry.Judge(); err != nil {
		return err
	}
	return registry.Unknown(id)
}

func isCode(name string) bool {
	_, err := strconv.ParseUint(name, 10, 32)
	return err == nil && len(name) == 6
}

// Revoke makes the device's credentials invalid and ends its session; it waits
// for approval at its next check. While the database is away it is in force on
// the nodes that the answer names, and written when that is back.
func (a *Admission) Revoke(ctx context.Context, by access.By, id devices.ID) (registry.Revoked, error) {
	r, err := a.registry.Revoke(ctx, by.Key(), id, Permit(by, id))
	if err == nil {
		a.log.Info("device revoked", "device", id, "recorded", r.Recorded)
	}
	return r, err
}

// Forget removes a device and its history. Its generation goes up, so that
// credentials it still holds stay dead. One that merely waits is turned away
// until it asks again.
func (a *Admission) Forget(ctx context.Context, by access.By, id devices.ID) error {
	return a.ForgetAt(ctx, by, id, 0)
}

// ForgetAt is Forget for the device at this revision; 0: whatever it is.
func (a *Admission) ForgetAt(ctx context.Context, by access.By, id devices.ID, ifMatch int64) error {
	waited := a.pending.waits(id, time.Now())
	err := a.registry.ForgetAt(ctx, by.Key(), id, ifMatch, Permit(by, id))
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

// Welcome is what CheckIn would answer the device's admitted client now; it
// changes nothing.
func (a *Admission) Welcome(id devices.ID) Welcome {
	is := a.registry.Standing(id, "")
	generation, ok := a.hub.Generation(id)
	return Welcome{Admitted: is.Member() || !is.Known && ok && !a.cfg.Approve, Generation: generation, Prefer: is.Prefer}
}

// Knows tells whether the device is known, admitted or not, or may be: before the
// members are read nobody can tell.
func (a *Admission) Knows(id devices.ID) bool {
	return !a.registry.Ready() || a.registry.Standing(id, "").Known || a.pending.waits(id, time.Now())
}

// IsMember tells whether the device is known and admitted.
func (a *Admission) IsMember(id devices.ID) bool { return a.registry.Standing(id, "").Member() }

// MemberOf tells whether the device is known and admitted, or may be, for adapters
// that act on its behalf.
func (a *Admission) MemberOf(id devices.ID) bool { return !a.registry.Ready() || a.IsMember(id) }

// ClientOf is the admitted Client-Id of a device; empty if there is none, or it
// cannot be read from the database now.
func (a *Admission) ClientOf(ctx context.Context, id devices.ID) string {
	m, err := a.registry.Decided(ctx, id)
	if err != nil {
		return ""
	}
	return m.ClientID
}
