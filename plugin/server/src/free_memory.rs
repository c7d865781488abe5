//! How much memory this process may still take: what the machine has free, or what its control
//! group (v2 or v1) still allows, whichever is less. Linux only; elsewhere the answer is `None`.

use std::fs;
use std::path::Path;

const UNLIMITED: u64 = 1 << 60;

/// Free memory in bytes, or `None` where the system does not tell.
pub fn free_memory_bytes() -> Option<u64> {
    free_memory_under(Path::new("/"))
}

fn free_memory_under(root: &Path) -> Option<u64> {
    let machine = available_bytes(&fs::read_to_string(root.join("proc/meminfo")).ok()?)?;
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let allowed = groups
        .lines()
        .filter_map(|line| group_free(root, line))
        .min();
    Some(allowed.map_or(machine, |allowed| allowed.min(machine)))
}

/// `MemAvailable` of `/proc/meminfo`, which counts in KiB.
fn available_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find(|line| line.starts_with("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    kib.checked_mul(1024)
}

/// What one line of `/proc/self/cgroup` (`id:controllers:path`) still allows, over the group and
/// all groups above it.
fn group_free(root: &Path, line: &str) -> Option<u64> {
    let mut parts = line.splitn(3, ':');
    let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
    let (mount, limit, usage) = match controllers {
        "" => ("sys/fs/cgroup", "memory.max", "memory.current"),
        list if list.split(',').any(|name| name == "memory") => (
            "sys/fs/cgroup/memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
        ),
        _ => return None,
    };
    let mount = root.join(mount);
    let mut folder = mount.join(path.trim_start_matches('/'));
    let mut least = None;
    loop {
        let free = number(&folder.join(limit))
            .filter(|limit| *limit < UNLIMITED)
            .map(|limit| {
                let used = number(&folder.join(usage)).unwrap_or(0);
                limit.saturating_sub(used.saturating_sub(cached_files(&folder)))
            });
        least = least.into_iter().chain(free).min();
        if folder == mount || !folder.pop() {
            return least;
        }
    }
}

/// Page cache that the kernel drops before it refuses memory.
fn cached_files(folder: &Path) -> u64 {
    let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let mut lines = stat.lines().filter_map(|line| line.split_once(' '));
    let value = lines.find(|(key, _)| matches!(*key, "inactive_file" | "total_inactive_file"));
    value
        .and_then(|(_, bytes)| bytes.trim().parse().ok())
        .unwrap_or(0)
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    struct Root(PathBuf);

    impl Root {
        fn new(name: &str, available_kib: u64) -> Root {
            let folder = format!("rootstock-free-memory-{}-{name}", std::process::id());
            let root = Root(std::env::temp_dir().join(folder));
            let meminfo =
                format!("MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable: {available_kib} kB\n");
            root.put("proc/meminfo", &meminfo);
            root
        }

        fn put(&self, path: &str, text: &str) {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn free(&self) -> Option<u64> {
            free_memory_under(&self.0)
        }
    }

    impl Drop for Root {
        fn drop(&mut self) {
            drop(fs::remove_dir_all(&self.0));
        }
    }

    #[test]
    fn the_machine_alone_tells_its_available_memory() {
        assert_eq!(Root::new("plain", 2048).free(), Some(2048 * 1024));
    }

    #[test]
    fn the_tightest_group_of_the_path_wins_and_page_cache_is_free() {
        let root = Root::new("v2", 1 << 20);
        root.put("proc/self/cgroup", "0::/outer/inner\n");
        root.put("sys/fs/cgroup/outer/inner/memory.max", "max\n");
        root.put("sys/fs/cgroup/outer/memory.max", "100000\n");
        root.put("sys/fs/cgroup/outer/memory.current", "70000\n");
        root.put(
            "sys/fs/cgroup/outer/memory.stat",
            "anon 5\ninactive_file 20000\n",
        );
        assert_eq!(root.free(), Some(50_000));
    }

    #[test]
    fn groups_of_version_one_are_read() {
        let root = Root::new("v1", 1 << 20);
        root.put("proc/self/cgroup", "5:cpu:/x\n4:memory:/box\n");
        root.put("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "4096\n");
        root.put("sys/fs/cgroup/memory/box/memory.usage_in_bytes", "1096\n");
        root.put(
            "sys/fs/cgroup/memory/memory.limit_in_bytes",
            "9223372036854771712\n",
        );
        assert_eq!(root.free(), Some(3000));
    }

    #[test]
    fn an_unknown_system_gives_no_number() {
        let nowhere = Path::new("/nonexistent-root");
        assert_eq!(free_memory_under(nowhere), None);
    }
}
