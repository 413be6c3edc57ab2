//go:build !unix

package datadir

import (
	"errors"
	"os"
)

// Running is not known here: nodes run on Unix systems.
func Running(string) (bool, error) {
	return false, errors.New("nodes do not run on this system; give --api URL and --token")
}

// lock refuses: elsewhere, fleetd is built for its client commands.
func lock(*os.File) error {
	return errors.New("nodes run on Unix systems")
}
