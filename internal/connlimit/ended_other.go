//go:build !linux

package connlimit

import "context"

// EndedWell is not known here, and true.
func EndedWell(context.Context) bool { return true }
