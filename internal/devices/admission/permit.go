package admission

import (
	"errors"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/registry"
)

// Permit refuses a decision about a device that has left those of the caller's key
// since the caller was asked.
func Permit(by access.By, id devices.ID) registry.Permit {
	return func(m *devices.Member) error {
		if !by.Who.Devices.MatchIdentity(string(id), m.Labels) {
			return devices.Errorf(devices.CodeForbidden, "the key is not for %s any more", id)
		}
		return nil
	}
}

// OrUnknown is an error of Records.Find.
func OrUnknown(id devices.ID, err error) error {
	if errors.Is(err, devices.ErrNotFound) {
		return registry.Unknown(id)
	}
	return err
}
