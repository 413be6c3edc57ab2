//go:build !unix

package node

import (
	"errors"
	"os"
)

func openFiles() int { return 0 }

// lock refuses: elsewhere, fleetd is built for its client commands.
func lock(*os.File) error {
	return errors.New("nodes run on Unix systems")
}
