package espimage

import (
	"slices"
	"strings"

	"fleetd/internal/selector"
)

// oldest is the first version that goes on after a failed attempt at an upgrade. Those before restart, for as long as they are
// offered the image (application.cc of v1.7.7, lines 170 to 174).
var oldest = []int{1, 8, 0}

// Version reads a version as the firmware does (Ota::ParseVersion): the text is split at its dots, and std::stoi reads each
// part, without a handler. ok is false if that aborts: the device would restart for as long as it gets such an answer. What stoi leaves out
// is left out here: 2.5.0-rc1 is 2.5.0. The empty text has no parts.
func Version(text string) (parts []int, ok bool) {
	if text == "" {
		return nil, true
	}
	return selector.AppendVersion(nil, text)
}

// Newer reports whether the firmware takes an offered version for newer than its own (Ota::IsNewVersionAvailable): the first difference
// decides, and of two that agree as far as they go the longer one is newer.
func Newer(own, offered []int) bool { return slices.Compare(own, offered) < 0 }

// IsTooOld reports whether a version restarts its device after each failed attempt at an upgrade.
func IsTooOld(version []int) bool { return slices.Compare(version, oldest) < 0 }

// IsPrerelease reports whether the firmware reads a version as another, shorter one: it never takes the release for newer.
func IsPrerelease(text string) bool {
	return strings.ContainsFunc(text, func(r rune) bool { return r != '.' && (r < '0' || r > '9') })
}
