// Package durable writes files that survive a power failure: a write that was reported as done is complete
// afterwards, and no file is written partially. Without a sync, a written and renamed file gets its name on the
// disk long before its content (ext4, XFS), and is empty after a power failure.
package durable

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// syncFile is replaced in tests.
var syncFile = (*os.File).Sync

// WriteFile atomically replaces a file, readable only by its owner.
func WriteFile(path string, content []byte) error {
	if err := replace(path, content, syncFile); err != nil {
		return err
	}
	return SyncDir(filepath.Dir(path))
}

// Note is WriteFile without waiting for the disk: after a kill of the process the file is complete, after a power failure it
// may be an older one, empty or missing.
func Note(path string, content []byte) error {
	return replace(path, content, func(*os.File) error { return nil })
}

func replace(path string, content []byte, sync func(*os.File) error) error {
	temp, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*") // mode 0600
	if err != nil {
		return err
	}
	_, err = temp.Write(content)
	if err == nil {
		err = sync(temp)
	}
	if err = errors.Join(err, temp.Close()); err == nil {
		err = os.Rename(temp.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(temp.Name()))
	}
	return nil
}

// Create creates a file that must not exist, with this content.
func Create(path string, mode fs.FileMode, content io.Reader) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
	if err != nil {
		return err
	}
	_, err = io.Copy(file, content)
	if err = errors.Join(err, file.Chmod(mode)); err == nil {
		err = syncFile(file)
	}
	if err = errors.Join(err, file.Close()); err != nil {
		return err
	}
	return SyncDir(filepath.Dir(path))
}

// Append appends to a file, and creates it if necessary, readable only by its owner. limit is the maximum size
// of the file before that, in bytes.
func Append(path string, limit int64, content []byte) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	info, err := file.Stat()
	if err == nil && info.Size() > limit {
		err = fmt.Errorf("%s has more than %d bytes", path, limit)
	}
	if err == nil {
		_, err = file.Write(content)
	}
	if err == nil {
		err = syncFile(file)
	}
	if err = errors.Join(err, file.Close()); err != nil {
		return err
	}
	return SyncDir(filepath.Dir(path))
}

// Rename renames a synced file, and replaces an existing one.
func Rename(from, to string) error {
	if err := os.Rename(from, to); err != nil {
		return err
	}
	return SyncDir(filepath.Dir(to))
}

// MkdirAll creates a directory and its parents, accessible only by their owner.
func MkdirAll(path string) error {
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		return nil
	}
	parent := filepath.Dir(path)
	if parent != path {
		if err := MkdirAll(parent); err != nil {
			return err
		}
	}
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return SyncDir(parent)
}

// SyncDir syncs a directory, so that its created, renamed and removed files survive.
func SyncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(syncFile(dir), dir.Close())
}
