package admission

import (
	"errors"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/registry"
)

// Permit refuses a decision about a device that has left the selector of the principal's
// key since the request was checked.
func Permit(principal access.Principal, id devices.ID) registry.Permit {
	return func(m *devices.Member) error {
		if !principal.Caller.Devices.MatchIdentity(string(id), m.Labels) {
			return devices.Errorf(devices.CodeForbidden, "the key no longer covers %s", id)
		}
		return nil
	}
}

// OrUnknown returns an error of Records.Find, or UnknownDevice for ErrNotFound.
func OrUnknown(id devices.ID, err error) error {
	if errors.Is(err, devices.ErrNotFound) {
		return registry.UnknownDevice(id)
	}
	return err
}
