//go:build !linux

package background

// supported is false where a priority belongs to a process.
const supported = false

func lowerPriority() {}

// Yield does nothing where no thread computes in the background.
func Yield() {}
