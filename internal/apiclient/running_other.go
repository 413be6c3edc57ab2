//go:build !unix

package apiclient

import "errors"

// Running is not known here: nodes run on Unix systems.
func Running(string) (bool, error) {
	return false, errors.New("nodes do not run on this system; give --api URL and --token")
}
