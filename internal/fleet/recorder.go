package fleet

import (
	"net/netip"

	"fleetd/internal/devices"
	"fleetd/internal/devices/session"
)

// NoteStep passes what a front end saw of a device to the recorder. The front end sets Proven if
// the client had valid credentials. Steps without a device are ignored.
func (s *Service) NoteStep(step devices.Step) {
	if s.ports.Recorder == nil || step.Device == "" {
		return
	}
	step.Unknown = !s.IsKnown(step.Device)
	s.ports.Recorder.Step(step)
}

// RemoteOf returns the address in a host:port; the zero one if there is none.
func RemoteOf(remote string) netip.Addr {
	addr, err := netip.ParseAddrPort(remote)
	if err != nil {
		return netip.Addr{}
	}
	return addr.Addr().Unmap()
}

// maxOldGenerations is how many earlier generations of credentials are recognized.
const maxOldGenerations = 8

// LoginCause returns why credentials that Authenticate did not accept are invalid. proves is
// that of Authenticate.
func (s *Service) LoginCause(id devices.ID, proves func(generation int64) bool) devices.StepCause {
	status := s.registry.Status(id, "")
	if s.registry.Ready() && !status.Known {
		return devices.CauseUnknownDevice
	}
	current, valid := s.Generation(id)
	for g := current; g >= max(0, current-maxOldGenerations); g-- {
		switch {
		case !proves(g):
		case !valid:
			return devices.StepCause(devices.CloseRevoked)
		default:
			return devices.CauseOldToken
		}
	}
	return devices.CauseWrongToken
}

// recordingPublisher records the events that are steps as well.
type recordingPublisher struct {
	session.Publisher
	recorder devices.Recorder
}

var eventSteps = map[devices.EventKind]devices.StepKind{devices.EventCatalog: devices.StepCatalog, devices.EventSilent: devices.StepSilent}

// Publish implements session.Publisher.
func (p recordingPublisher) Publish(e devices.Event) {
	if kind, ok := eventSteps[e.Kind]; ok {
		p.recorder.Step(devices.Step{Kind: kind, Device: e.Device, Epoch: e.Epoch, Proven: true})
	}
	p.Publisher.Publish(e)
}
